"""The tables of peers' names: our options, settings and variables exist, and those listed as missing do not."""

import json
import re
from pathlib import Path
from typing import Final

import pytest
import typer
from starlette.applications import Starlette
from starlette.routing import Match

from components.errors import Rejected
from components.openai.chat import ChatRequest
from components.openai.completions import CompletionRequest
from components.openai.fields import parse_body
from components.routing.policies import parse_policy
from services.frontend.app import create_app
from services.frontend.config import FrontendSettings
from services.local.__main__ import app
from services.local.options import settable
from tests.components.text.tiny_model import tiny_text_model
from tests.services.frontend.fake_mesh import FakeMesh

DOCS: Final = Path(__file__).resolve().parents[2] / "docs"
TEXT: Final = "".join((DOCS / page).read_text() for page in ("from-vllm.md", "from-sglang-and-dynamo.md"))
OURS: Final = [row.split("|")[2] for row in TEXT.splitlines() if re.match(r"\| `(--|[A-Z]{3})", row)]
POLICIES: Final = re.findall(r"`(?:decode\.prefill|frontend\.decode)_policy=([^`]+)`", TEXT)


def test_every_setting_that_the_table_names_is_one_that_set_takes() -> None:
    names = {name for name, _, _ in settable()}
    named = {name for column in OURS for name in re.findall(r"`([a-z][a-z_.]*[._][a-z_.]*)(?:=[^`]+)?`", column)}
    assert len(named) > 30
    assert named <= names


def test_every_variable_that_the_text_names_is_one() -> None:
    named = set(re.findall(r"MESH_\w*[A-Z]\b", TEXT))
    assert named <= {variable for _, variable, _ in settable()} | {"MESH_FRONTEND_API_KEYS"}


def test_every_option_that_the_table_names_is_one_of_services_local() -> None:
    options = {name for parameter in typer.main.get_command(app).params for name in parameter.opts}
    named = {option for column in OURS for option in re.findall(r"--[a-z-]+", column)}
    assert len(named) > 5
    assert named <= options


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_that_the_table_names_can_be_chosen(policy: str) -> None:
    assert parse_policy(policy).name == policy.partition("@")[0]


def _first_column(title: str) -> list[str]:
    sections = [part.partition("\n## ")[0] for part in TEXT.split(f"## {title}\n")[1:]]
    rows = [row.split("|")[1] for row in "\n".join(sections).splitlines() if row.startswith("| ") and "`" in row]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


@pytest.mark.parametrize("field", _first_column("Fields that are refused"))
def test_a_field_that_is_said_to_be_refused_is(field: str) -> None:
    prompts = ((ChatRequest, {"messages": [{"role": "user", "content": "a"}]}), (CompletionRequest, {"prompt": "a"}))
    for model, prompt in prompts:
        with pytest.raises(Rejected) as caught:
            parse_body(model, json.dumps({"model": "m", **prompt, field: None}).encode())
        assert caught.value.fields["code"] == "unknown_parameter"


def test_a_route_that_is_said_to_be_missing_is() -> None:
    text = tiny_text_model()
    app: Starlette = create_app(FakeMesh(text), text, FrontendSettings(port=0))
    missing = _first_column("Unsupported routes")
    assert len(missing) > 10
    for path in missing:
        scope = {"type": "http", "path": path, "method": "GET", "headers": []}
        assert all(route.matches(scope)[0] is Match.NONE for route in app.routes), path
