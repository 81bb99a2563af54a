"""make clients: the packages that users bring, as they install them, against a running mesh.

Each runs as a process of its own (`scripts/`), asks the same as the others, and tells what it got.
CLIENTS_MODEL=smollm2-135m asks the real model instead of a mock with its tokenizer.
"""

import json
import os
import subprocess
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx
import jsonschema  # type: ignore[import-untyped, unused-ignore]
import pytest

from tests.clients.conftest import REPO, SERVED
from tests.clients.scripts import asked
from tests.clients.scripts.asked import Person
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.clients, pytest.mark.mesh, pytest.mark.timeout(900)]  # the first run installs packages

SCRIPTS: Final = Path(__file__).with_name("scripts")
BAD, MISSING = "BadRequestError", "NotFoundError"
CLIENTS: Final = {  # the classes of what is refused: a prompt that is too long, an unknown model, embeddings
    "openai": (BAD, MISSING, BAD),
    "openai responses": (BAD, MISSING, None),
    "anthropic": (BAD, MISSING, None),
    "langchain": ("OpenAIContextOverflowError", "OpenAIModelNotFoundError", BAD),
    "langchain responses": ("OpenAIContextOverflowError", "OpenAIModelNotFoundError", BAD),
    "llm": (BAD, MISSING, BAD),
    "llm responses": (BAD, MISSING, BAD),
}
ASKED: Final = {
    name: getattr(asked, name)
    for name in ("ASK", "ASK_FOR_PERSON", "ASK_FOR_WEATHER", "MAX_TOKENS", "ROOM", "NO_MODEL", "TOO_LONG", "WEATHER")
}


@pytest.mark.parametrize("name", CLIENTS)
def test_a_python_client_gets_what_the_mesh_says(
    name: str, client_mesh: str, client_python: Path, tmp_path: Path
) -> None:
    package, *arguments = name.split()
    env = {"OPENAI_BASE_URL": f"{client_mesh}/v1", "LLM_USER_PATH": str(tmp_path)}
    command = [client_python, "-m", f"tests.clients.scripts.with_{package}", *arguments]
    judge(run(command, client_mesh, env), client_mesh, *CLIENTS[name])


def test_the_client_of_node_gets_what_the_mesh_says(client_mesh: str, node_modules: Path) -> None:
    env = {"NODE_PATH": str(node_modules), "ASKED": json.dumps(ASKED)}
    judge(run(["node", SCRIPTS / "with_openai_node.cjs"], client_mesh, env), client_mesh, BAD, MISSING, BAD)


def test_the_command_of_llm_prints_answers_and_our_errors(
    client_mesh: str, client_python: Path, tmp_path: Path
) -> None:
    llm = client_python.with_name("llm")
    ask = [llm, "openai", "endpoint", f"{client_mesh}/v1", asked.ASK, "-o", "temperature", "0"]
    env = {**os.environ, "LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "none"}
    ended = partial(subprocess.run, env=env, check=False, capture_output=True, text=True, timeout=PATIENCE_S)
    answered = ended([*ask, "-m", SERVED])
    assert (answered.returncode, answered.stdout.strip()) == (0, the_chat(client_mesh)[0].strip()), answered.stderr
    refused = ended([*ask, "-m", asked.NO_MODEL])
    assert refused.returncode == 1
    assert f"The model '{asked.NO_MODEL}' does not exist." in refused.stderr


def test_aiperf_counts_the_tokens_that_we_count(
    client_mesh: str, aiperf: Path, real_model_dir: Path, tmp_path: Path
) -> None:
    """50 streams, 4 at once, of 64 tokens of prompt and 16 of an answer, by the server's usage."""
    options = {
        "--model": SERVED,
        "--url": client_mesh,
        "--endpoint-type": "chat",
        "--concurrency": "4",
        "--request-count": "50",
        "--tokenizer": str(real_model_dir),
        "--isl": "64",
        "--osl": "16",
        "--extra-inputs": "ignore_eos:true",
        "--ui": "none",
        "--artifact-dir": str(tmp_path),
    }
    before = counted(client_mesh)
    command = [
        aiperf,
        "profile",
        "--streaming",
        "--use-server-token-count",
        *(x for pair in options.items() for x in pair),
    ]
    env = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}  # it then reads no directory
    done = subprocess.run(command, env=env, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    print("aiperf", report["aiperf_version"])  # noqa: T201  which version it was is part of the result
    assert (report["error_summary"], report["was_cancelled"]) == ([], False)
    assert report["request_count"]["avg"] == 50
    told = [int(report[f"total_usage_{kind}_tokens"]["avg"]) for kind in ("prompt", "completion")]
    assert told == [after - start for start, after in zip(before, counted(client_mesh), strict=True)]
    assert told[1] == 50 * 16


def run(command: list[Any], url: str, env: Mapping[str, str]) -> dict[str, Any]:
    """What a client tells, which sees no settings of ours or of OpenAI beside those of the test."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("MESH_", "OPENAI_", "ANTHROPIC_"))
    }
    settings = {"ASKED_URL": url, "ASKED_MODEL": SERVED, **env}
    done = subprocess.run(
        command, cwd=REPO, env={**inherited, **settings}, check=False, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    print(told["versions"])  # noqa: T201  which versions they were is part of the result
    return dict(told)


def judge(told: dict[str, Any], url: str, long: str, model: str, embeddings: str | None) -> None:
    """That it is what the mesh says to bare HTTP."""
    answer, usage = the_chat(url)
    assert told["answer"] == answer
    assert told["usage"] == usage
    assert "".join(told["pieces"]) == answer
    assert len(told["pieces"]) > 3, "no stream"
    assert told["stream_usage"] == usage
    [[name, arguments]] = told["calls"]
    assert name == "get_weather"
    jsonschema.validate(arguments, asked.WEATHER)
    assert told["after_call"]
    Person.model_validate(told["person"])
    expected = {"long": (long, refusal(url, asked.TOO_LONG)), "model": (model, refusal(url, asked.ASK, asked.NO_MODEL))}
    if embeddings is not None:
        body = {"model": SERVED, "input": [asked.ASK]}
        refused = httpx.post(f"{url}/v1/embeddings", json=body, timeout=PATIENCE_S)
        assert refused.status_code == 400
        expected["embeddings"] = (embeddings, refused.json()["error"]["message"])
    assert set(told["errors"]) == set(expected)
    for what, (kind, message) in expected.items():
        assert told["errors"][what][0] == kind
        assert message in told["errors"][what][1]


def post(url: str, text: str, model: str = SERVED) -> httpx.Response:
    """A chat by bare HTTP."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": asked.MAX_TOKENS,
    }
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENCE_S)


def the_chat(url: str) -> tuple[str, list[int]]:
    """The answer, and the tokens of prompt and answer."""
    answer = post(url, asked.ASK).raise_for_status().json()
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "stop"
    return choice["message"]["content"], [answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]]


def refusal(url: str, text: str, model: str = SERVED) -> str:
    """The message of the error."""
    return str(post(url, text, model).json()["error"]["message"])


def counted(url: str) -> list[int]:
    """Tokens of prompts and of answers that the frontend has counted."""
    lines = httpx.get(f"{url}/metrics", timeout=PATIENCE_S).text.splitlines()
    return [
        int(sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}_total{{")))
        for name in ("kvmesh_prompt_tokens", "kvmesh_generation_tokens")
    ]
