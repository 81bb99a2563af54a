"""LoRA adapters, requested over HTTP by name: the answers are those of merged weights."""

import asyncio
import json
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from components.startup import EX_CONFIG
from components.text.tokenizer import TextModel
from tests.components.text.tiny_model import tiny_tokenizer
from tests.engine.lora.lora_files import merge, save_adapter
from tests.engine.tiny_engine import save_tiny
from tests.mesh.harness import MeshProcesses, Worker, open_client
from tests.mesh.preloaded import Preloaded
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.mesh

MODEL: Final = "base"
MAX_TOKENS: Final = 24
PROMPTS: Final = tuple(
    [3 + (i * 29 + j * 17 + j * j // 5) % 250 for j in range(length)]
    for i, length in enumerate((20, 47, 130, 33, 64, 150))
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with its tokenizer, two adapters, and the model with each of them merged."""
    home = tmp_path_factory.mktemp("adapters")
    tokenizer = tiny_tokenizer()
    save_tiny(home / MODEL, vocab_size=tokenizer.get_vocab_size())
    tokenizer.save(str(home / MODEL / "tokenizer.json"))
    for seed, name in enumerate(("legal", "medical"), 1):
        save_adapter(home / name, home / MODEL, seed, rank=2 * seed)
        merge(home / MODEL, home / name, home / f"merged-{name}")
    return home


@pytest.fixture(scope="module")
def expected(home: Path) -> dict[str, list[str]]:
    """The right texts by model: transformers' greedy tokens, detokenised."""
    text = TextModel.load(home / MODEL)
    answers: dict[str, list[str]] = {}
    for name, directory in ((MODEL, MODEL), ("legal", "merged-legal"), ("medical", "merged-medical")):
        model: Any = AutoModelForCausalLM.from_pretrained(home / directory, dtype=torch.float32).eval()
        model.generation_config = GenerationConfig()  # greedy, and no end of text
        for prompt in PROMPTS:
            ids = torch.tensor([prompt])
            with torch.inference_mode():
                out = model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, pad_token_id=0
                )
            detokenizer = text.detokenizer(prompt)
            answers.setdefault(name, []).append(detokenizer.feed(out[0, len(prompt) :].tolist()) + detokenizer.flush())
    return answers


@pytest.fixture
def mesh(etcd_url: str, nats_url: str, preloaded: Preloaded, namespace: str, home: Path, tmp_path: Path) -> Any:
    env = {
        "MESH_ENGINE__DTYPE": "float32",
        "MESH_ENGINE__NUM_PAGES": "512",
        "MESH_ENGINE__MAX_STEP_TOKENS": "96",
        "MESH_ENGINE__THREADS": "1",
        "MESH_ENGINE__LORA": _adapters(home, legal="legal", medical="medical"),
        "MESH_DECODE_MAX_LOCAL_PREFILL": "0",
    }
    with MeshProcesses(etcd_url, nats_url, namespace, tmp_path, str(home / MODEL), env, preloaded) as made:
        yield made


def _adapters(home: Path, **directories: str) -> str:
    return json.dumps({name: str(home / directory) for name, directory in directories.items()})


def _models(frontend: Worker, count: int) -> list[tuple[str, str | None]]:
    wait_until(lambda: len(frontend.models()) >= count, frontend.models)
    return [(card["id"], card["parent"]) for card in frontend.models()]


async def _ask_all(frontend: Worker, models: list[str], numbers: range) -> dict[str, list[str]]:
    """Send the prompts of these numbers to every model at once."""
    prompts = PROMPTS[numbers.start : numbers.stop]
    async with httpx.AsyncClient(timeout=PATIENCE_S) as http:

        async def ask(model: str, prompt: list[int]) -> str:
            body = {"model": model, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
            answer = (await http.post(f"{frontend.url}/v1/completions", json=body)).json()
            assert answer["model"] == model
            return str(answer["choices"][0]["text"])

        texts = await asyncio.gather(*(ask(model, prompt) for model in models for prompt in prompts))
    return {model: list(texts[i * len(prompts) : (i + 1) * len(prompts)]) for i, model in enumerate(models)}


async def _prefill_is_known(mesh: MeshProcesses) -> None:
    async with open_client(mesh, MODEL) as client:
        await client.until_usable("prefill")


def test_adapters_and_the_model_answer_at_once_as_if_merged_and_no_prompt_goes_to_other_weights_of_the_name(
    mesh: MeshProcesses, home: Path, expected: dict[str, list[str]]
) -> None:
    _, prefill, decode, frontend = mesh.start("bootstrap", "prefill", "decode", "frontend")
    assert _models(frontend, 3) == [(MODEL, None), ("legal", MODEL), ("medical", MODEL)]
    for _ in range(2):  # the second time with prefix hits
        answers = asyncio.run(_ask_all(frontend, [MODEL, "legal", "medical"], range(3)))
        assert answers == {model: texts[:3] for model, texts in expected.items()}
    assert len({tuple(texts) for texts in expected.values()}) == 3
    assert "must load the same weights" not in decode.logged()
    assert prefill.terminate() == 0
    mesh.start_one("prefill", MESH_ENGINE__LORA=_adapters(home, legal="medical"))
    asyncio.run(_prefill_is_known(mesh))
    answers = asyncio.run(_ask_all(frontend, ["legal", MODEL, "medical"], range(3, 6)))
    assert answers == {model: texts[3:] for model, texts in expected.items()}
    assert decode.logged().count("must load the same weights as adapter 'legal'") == 1
    recomputed = [line for line in decode.logged().splitlines() if "computing the prompt here" in line]
    stalled = ("silent for", "no bootstrap instance opened a room")  # on a busy machine
    assert all(any(cause in line for cause in stalled) for line in recomputed), "they were not asked in the first place"


def test_an_adapter_with_the_models_own_name_stops_the_start(mesh: MeshProcesses, home: Path) -> None:
    worker = mesh._spawn("decode", {"MESH_ENGINE__LORA": _adapters(home, base="legal")})
    assert worker.exit_code() == EX_CONFIG
    assert "setting engine.lora: 'base' is the name of the model itself" in worker.logged()
