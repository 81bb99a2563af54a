"""The examples of README and docs/openai.md, run against a mesh: they answer as the pages say."""

import contextlib
import doctest
import io
import json
import re
import subprocess
from collections.abc import Iterator
from typing import Any, Final

import pytest

from tests.docs.pages import REPO, blocks, lines
from tests.mesh.harness import MeshProcesses
from tests.waiting import wait_until

pytestmark = [pytest.mark.mesh, pytest.mark.model]

ADDRESS: Final = "http://127.0.0.1:8000"
REQUEST: Final = re.compile(r"(?:ask|curl) ")
PREPARATION: Final = re.compile(r"export OPENAI|ask\(\)")
OTHER_MODEL: Final = "Qwen/"
README: Final = (REPO / "README.md").read_text()
OPENAI: Final = (REPO / "docs/openai.md").read_text()


@pytest.fixture(scope="module")
def url(real_mesh: MeshProcesses) -> str:
    frontend = real_mesh.one("frontend")
    wait_until(frontend.models)
    return frontend.url


def shell(text: str, url: str) -> Iterator[tuple[str, str]]:
    """(request, output) of each `ask` and `curl`, with the functions and variables that the page sets before."""
    text = text.replace(ADDRESS, url)
    every = [line for block in blocks(text) for line in lines(block)]
    preparation = [line for line in every if PREPARATION.match(line)]
    for line in every:
        if REQUEST.match(line) and OTHER_MODEL not in line:
            script = "\n".join(["set -eu", *preparation, line])
            done = subprocess.run(["bash", "-c", script], check=True, capture_output=True, text=True)
            yield line, done.stdout


def test_the_requests_of_the_page_are_answered(url: str) -> None:
    answers = [*shell(OPENAI, url)]
    assert len(answers) == 6
    for request, output in answers:
        if '"stream": true' in request:
            assert output.startswith("data: {"), output
            assert output.endswith("data: [DONE]\n\n"), output
        else:
            assert "choices" in json.loads(output), output


def test_the_answer_in_the_readme_is_the_real_one(url: str) -> None:
    [(_, output)] = shell(README, url)
    [shown] = [block for block in blocks(README) if '"object":"chat.completion"' in block]
    shown = shown[shown.index('{"id"') :]
    assert form(json.loads(output)) == form(json.loads(shown))
    assert json.loads(output)["choices"] == json.loads(shown)["choices"]


def form(value: Any) -> Any:
    """Names and types."""
    if isinstance(value, dict):
        return {name: form(inner) for name, inner in value.items()}
    return [form(inner) for inner in value] if isinstance(value, list) else type(value)


def test_the_examples_in_python_give_what_the_page_shows(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON of the same form is enough: other kernels choose other names."""
    monkeypatch.setenv("OPENAI_BASE_URL", f"{url}/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    names: dict[str, Any] = {}
    examples = doctest.DocTestParser().get_examples(OPENAI.replace(ADDRESS, url))
    assert len(examples) > 12
    with contextlib.ExitStack() as stack:
        for example in examples:
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(example.source, "docs/openai.md", "single"), names)
            if example.source.startswith("client = "):
                stack.callback(names["client"].close)
            assert same(example.want, printed.getvalue()), (example.source, printed.getvalue())


def same(shown: str, printed: str) -> bool:
    if shown == printed:
        return True
    try:
        return bool(form(parsed(shown)) == form(parsed(printed)))
    except ValueError:
        return False


def parsed(text: str) -> Any:
    return json.loads(text.strip().strip("'").replace("\\n", "\n"))
