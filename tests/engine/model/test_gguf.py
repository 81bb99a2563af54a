"""A GGUF file as model is converted once and gives the ids of its model, or is refused with the reason."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma3TextConfig, PreTrainedModel, Qwen2Config

from components.text.tokenizer import TextModel
from engine.errors import ModelUnavailable
from engine.model import converted
from engine.model.convert import GEMMA_27B, CannotConvert, convert
from engine.model.load import load_model
from engine.model.progress import Progress, silent
from engine.model.resolve import content_key, model_dir, served_name
from engine.ports import EngineRequest
from tests.engine.model.families import FAMILIES, FOUR_LAYERS, reference, reference_greedy, reference_logits, save_model
from tests.engine.model.tiny_gguf import TOKENS, write_gguf
from tests.engine.tiny_engine import greedy, make_engine, prompt, run, small
from tests.waiting import PATIENCE_S

REPO = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    config = Qwen2Config(**FOUR_LAYERS)
    config.rope_parameters["rope_theta"] = 5000.0
    config.tie_word_embeddings = False
    return reference(save_model(tmp_path_factory.mktemp("original"), config))


@pytest.fixture(scope="module")
def file(original: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("files") / "tiny.F32.gguf", original)


@pytest.fixture(scope="module")
def reported() -> list[tuple[str, int, int]]:
    """The progress of the conversion into `state_dir`."""
    return []


@pytest.fixture(scope="module")
def state_dir(file: Path, reported: list[tuple[str, int, int]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the converted file."""
    home = tmp_path_factory.mktemp("state")
    load_model(str(file), small(dtype="float32"), home, lambda *progress: reported.append(progress))
    return home


def copy_instead(task: str, source: Path, finishing: Sequence[Path | str], _lock: IO[str], progress: Progress) -> None:
    """Replaces `converted._convert`, whose child process takes seconds of a core."""
    partial, done, _ = map(Path, finishing)
    assert not list(partial.iterdir())
    progress(task, 0, 1)
    shutil.copy(source, partial / "model.safetensors")
    partial.rename(done)
    progress(task, 1, 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gguf_file_gives_the_ids_of_the_model_in_it(
    original: PreTrainedModel, file: Path, state_dir: Path, dtype: str
) -> None:
    loaded = load_model(str(file), small(dtype=dtype), state_dir, silent)
    assert loaded.layout.model.startswith("tiny.F32@")
    assert loaded.eos_token_ids == {TOKENS.index("<|endoftext|>"), TOKENS.index("<|im_end|>")}
    seen = run(make_engine(loaded), [EngineRequest("r", prompt(60), greedy(16, ignore_eos=True))])
    if dtype == "float32":
        assert seen.tokens["r"] == reference_greedy(original, prompt(60), 16)
    else:
        assert seen.tokens["r"]


def test_it_is_converted_once_wherever_it_lies(
    file: Path, state_dir: Path, reported: list[tuple[str, int, int]], tmp_path: Path
) -> None:
    converting = "Converting tiny.F32 (once; about 10 s)"
    assert [step for step in reported if step[0] == converting] == [(converting, done, 3) for done in range(4)]
    told: list[str] = []
    first = model_dir(str(file), state_dir)
    copied = Path(shutil.copy(file, tmp_path / "tiny.F32.gguf"))
    os.utime(copied, (0, 0))
    assert model_dir(str(copied), state_dir, lambda task, _done, _total: told.append(task)) == first
    assert model_dir(str(tmp_path), state_dir) == first, "the directory that holds it"
    assert told == []
    assert first.parent == state_dir / "models"


def test_the_frontend_finds_its_tokenizer_and_chat_template(file: Path, state_dir: Path) -> None:
    text = TextModel.load(model_dir(str(file), state_dir))
    assert text.mentions("messages")
    assert text.vocab_size == len(TOKENS)
    ids = text._encode("cab", add_special_tokens=False)
    assert [TOKENS[token_id] for token_id in ids] == ["c", "ab"]
    assert text.decode([*ids, TOKENS.index("<|endoftext|>")]) == "cab"


def test_it_is_served_under_the_name_of_the_file_or_of_its_directory(file: Path) -> None:
    assert served_name(str(file)) == "tiny.F32"
    assert served_name(str(file.parent)) == file.parent.name


def test_other_weights_under_the_same_name_are_another_model(
    original: PreTrainedModel, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(converted, "_convert", copy_instead)
    original.lm_head.weight.data[0, 0] += 1
    other = write_gguf(tmp_path / file.name, original)
    original.lm_head.weight.data[0, 0] -= 1
    found = [model_dir(str(path), tmp_path / "state") for path in (file, other)]
    assert found[0] != found[1]
    assert [(directory / "model.safetensors").read_bytes() for directory in found] == [
        path.read_bytes() for path in (file, other)
    ]


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match=f"no such file: {tmp_path / 'no.gguf'}"):
        model_dir(str(tmp_path / "no.gguf"), tmp_path)


def test_a_directory_of_several_files_is_answered_with_their_names(file: Path, tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(file, tmp_path / name)
    with pytest.raises(ModelUnavailable, match=r"name one of them: a\.gguf, b\.gguf"):
        model_dir(str(tmp_path), tmp_path)


def test_weights_beside_a_gguf_file_are_preferred(file: Path, tmp_path: Path) -> None:
    directory = save_model(tmp_path / "both", FAMILIES["llama"]())
    shutil.copy(file, directory)
    assert model_dir(str(directory), tmp_path) == directory


def test_a_file_that_cannot_be_converted_leaves_nothing_behind(file: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(
        ModelUnavailable, match=r"damaged\.gguf could not be converted: it is not a GGUF file, or truncated"
    ):
        model_dir(str(damaged), tmp_path / "state")
    assert not [path for path in (tmp_path / "state" / "models").iterdir() if not path.name.startswith(".")]


def test_an_interrupted_conversion_starts_over_and_logs_it(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are never used as the model; no line reported it."""
    monkeypatch.setattr(converted, "_convert", copy_instead)
    told: list[str] = []

    def progress(task: str, done: int, total: int) -> None:
        told.append(task)

    key = content_key(file)
    left = tmp_path / "models" / f".{file.stem}-{key}-v{converted.VERSION}.partial"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    found = model_dir(str(file), tmp_path, progress)
    assert found.name == f"{file.stem}-{key}-v{converted.VERSION}"
    assert (found / "model.safetensors").stat().st_size > 1000
    assert not left.exists()
    assert set(told) == {f"Converting {file.stem} (again, as it was interrupted; about 10 s)"}


def test_a_conversion_whose_parent_is_killed_ends_and_is_used(file: Path, tmp_path: Path) -> None:
    """The conversion continued without a parent, and the next start converted again."""
    names = "import sys; from pathlib import Path; from engine.model.resolve import model_dir"
    program = f"{names}; model_dir(sys.argv[1], Path(sys.argv[2]))"
    parent = subprocess.Popen([sys.executable, "-c", program, str(file), str(tmp_path)], cwd=REPO)
    models, key = tmp_path / "models", content_key(file)
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
    while not children.read_text():
        assert parent.poll() is None
        time.sleep(0.01)
    parent.kill()
    parent.wait(PATIENCE_S)
    told: list[str] = []
    found = model_dir(str(file), tmp_path, lambda task, done, total: told.append(task))
    assert found == models / f"{file.stem}-{key}-v{converted.VERSION}"
    assert not [task for task in told if task.startswith("Converting")]


@pytest.mark.parametrize("kept", [0.0, 0.0001, 0.001, 0.01, 0.5, 0.999])
def test_a_truncated_file_is_called_that(file: Path, tmp_path: Path, kept: float) -> None:
    damaged = tmp_path / "damaged.gguf"
    whole = file.read_bytes()
    damaged.write_bytes(whole[: int(kept * len(whole))])
    with pytest.raises(CannotConvert, match="truncated"):
        convert(damaged, tmp_path)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"architecture": "rwkv6"}, "transformers does not read 'rwkv6' from GGUF"),
        ({"qwen2.attention.sliding_window": 32}, "its sliding_window is 32, which transformers reads as None"),
        ({"qwen2.block_count": 5}, r"lacks 12 of the model's tensors, among them model\.layers\.4"),
        ({"split.count": 3}, "one of several parts"),
    ],
    ids=["architecture", "window", "tensor", "split"],
)
def test_what_would_not_come_out_right_is_refused(
    original: PreTrainedModel, tmp_path: Path, fields: dict[str, object], said: str
) -> None:
    path = write_gguf(tmp_path / "odd.gguf", original, **fields)
    with pytest.raises(CannotConvert, match=said):
        convert(path, tmp_path)


def test_a_file_with_tokens_that_end_a_turn_names_them_all(original: PreTrainedModel, tmp_path: Path) -> None:
    """Only the end of a text counted, so answers continued after their turn."""
    ends = {"tokenizer.ggml.eot_token_id": 99, "tokenizer.ggml.eom_token_id": 101}
    convert(write_gguf(tmp_path / "ends.gguf", original, **ends), tmp_path)
    named = json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"]
    assert named == [99, 101, TOKENS.index("<|im_end|>"), TOKENS.index("<|endoftext|>")]


@pytest.mark.parametrize(
    ("splitter", "pieces"), [("smollm", ["1", "2", "a"]), ("qwen2", ["1", "2", "a"]), ("gpt-2", ["12", "a"])]
)
def test_texts_are_split_as_the_file_names_it(
    original: PreTrainedModel, tmp_path: Path, splitter: str, pieces: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The default model's prompts had several digits in a token, unlike its training."""
    convert(write_gguf(tmp_path / "split.gguf", original, splitter=splitter), tmp_path)
    ids = TextModel.load(tmp_path)._encode("12a", add_special_tokens=False)
    assert [TOKENS[token_id] for token_id in ids] == pieces
    assert converted.WARNING_MARK not in capsys.readouterr().out


def test_control_tokens_keep_the_names_and_ids_of_the_file(original: PreTrainedModel, tmp_path: Path) -> None:
    """Names with letters outside of the byte alphabet were added again behind the vocabulary, and were refused there.

    So was `<|endoftext|>`, which a user may write, if the file lacks it.
    """
    bar = "\uff5c"  # the wide one
    names = [f"<{bar}{name}{bar}>" for name in ("User", "begin▁of▁sentence", "end▁of▁sentence")]
    convert(write_gguf(tmp_path / "r1.gguf", original, tokens=[*TOKENS[:-3], *names]), tmp_path)
    text = TextModel.load(tmp_path)
    assert [text._encode(name, add_special_tokens=False) for name in names] == [[125], [126], [127]]
    assert text.decode([126, *range(64, 67), 127], skip=True) == "abc"
    assert text.vocab_size == len(TOKENS)
    letters = text._encode("<|endoftext|>", add_special_tokens=False)
    assert "".join(TOKENS[token_id] for token_id in letters) == "<|endoftext|>"


@pytest.mark.parametrize(
    ("splitter", "fields", "expected"),
    [
        ("llama-bpe", {}, ["<bos>", "12", "a"]),
        ("llama-bpe", {"tokenizer.ggml.add_bos_token": False}, ["12", "a"]),
        ("gpt-2", {}, ["12", "a"]),
    ],
)
def test_a_text_begins_as_in_llama_cpp(
    original: PreTrainedModel, tmp_path: Path, splitter: str, fields: dict[str, bool], expected: list[str]
) -> None:
    """Llama 3's files may lack that texts begin with a token."""
    convert(write_gguf(tmp_path / "begins.gguf", original, splitter=splitter, **fields), tmp_path)
    ids = TextModel.load(tmp_path)._encode("12a", add_special_tokens=True)
    assert [TOKENS[token_id] for token_id in ids] == expected


@pytest.mark.parametrize(("fields", "first"), [({}, "▁"), ({"tokenizer.ggml.add_space_prefix": False}, "a")])
def test_words_begin_with_a_space_unless_the_file_says_otherwise(
    tmp_path: Path, fields: dict[str, bool], first: str
) -> None:
    tokens = ["▁" if token == "Ġ" else token for token in TOKENS]
    model = reference(save_model(tmp_path / "llama", FAMILIES["llama"]()))
    convert(write_gguf(tmp_path / "words.gguf", model, splitter=None, tokens=tokens, **fields), tmp_path)
    text = TextModel.load(tmp_path)
    ids = text._encode("a c", add_special_tokens=False)
    assert [tokens[token_id] for token_id in ids][-3:] == ["a", "▁", "c"]
    assert tokens[ids[0]] == first
    assert text.decode(ids, skip=True) == "a c"


def test_an_unknown_splitter_is_reported(
    original: PreTrainedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert(write_gguf(tmp_path / "split.gguf", original, splitter="odd-llm"), tmp_path)
    assert f"{converted.WARNING_MARK}its tokenizer.ggml.pre is 'odd-llm'" in capsys.readouterr().out


def test_a_warning_of_the_converter_is_logged(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    converter = tmp_path / "converter"
    converter.write_text(f"#!/bin/sh\nprintf '{converted.WARNING_MARK}odd splitter\\n'\n")
    converter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(converter))
    with (tmp_path / "lock").open("w") as lock:
        converted._convert("Converting", file, [], lock, silent)
    [warned] = [record for record in caplog.records if record.message == "the conversion of a GGUF file may be wrong"]
    assert (vars(warned)["file"], vars(warned)["reason"]) == (str(file), "odd splitter")


def write_gemma(directory: Path, kind: type[Gemma2Config | Gemma3TextConfig]) -> tuple[PreTrainedModel, Path]:
    """Write a model with heads of 32 in four layers and the 27B's scale of attention."""
    sizes = {**FOUR_LAYERS, "head_dim": 32, "query_pre_attn_scalar": 64 // 4, "sliding_window": 512}
    model = reference(save_model(directory / "original", kind(**sizes)))
    attention = f"{model.config.model_type.removesuffix('_text')}.attention"
    fields = {f"{attention}.{key}_length": 32 for key in ("key", "value")} | {f"{attention}.sliding_window": 512}
    return model, write_gguf(directory / "gemma.gguf", model, **fields)


@pytest.mark.parametrize("kind", [Gemma2Config, Gemma3TextConfig])
def test_gemmas_of_27b_have_their_own_scale_of_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Gemma2Config | Gemma3TextConfig]
) -> None:
    """GGUF lacks it, and transformers took 256, as for the smaller ones."""
    monkeypatch.setattr("engine.model.convert.GEMMA_27B", dict.fromkeys(GEMMA_27B, 4))
    model, path = write_gemma(tmp_path, kind)
    convert(path, tmp_path)
    read = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert torch.allclose(reference_logits(read, prompt(20)), reference_logits(model, prompt(20)), atol=1e-3)


def test_a_gemma_of_unknown_size_is_refused(tmp_path: Path) -> None:
    _, path = write_gemma(tmp_path, Gemma2Config)
    with pytest.raises(CannotConvert, match="the scale of its attention is unknown"):
        convert(path, tmp_path)


def test_an_f16_file_stays_one_where_some_matrices_are_f32(original: PreTrainedModel, tmp_path: Path) -> None:
    matrices = [name for name, tensor in original.state_dict().items() if tensor.ndim > 1]
    convert(write_gguf(tmp_path / "half.gguf", original, halves=matrices[1:]), tmp_path)
    assert {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()} == {torch.float16}
