"""schemathesis makes valid and invalid requests from /openapi.json; none may be answered with a 5xx.

Here against a frontend over a mesh in memory; `make fuzz` sends ten thousand to a mesh of real processes.
"""

import re
import sys
from collections import Counter
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from schemathesis.core.errors import InvalidSchema
from schemathesis.generation import GenerationMode

from services.frontend.app import create_app
from services.frontend.config import FrontendSettings
from tests.components.text.tiny_model import tiny_text_model
from tests.mesh.harness import MeshProcesses, Worker
from tests.services.frontend.fake_mesh import MODEL, FakeMesh
from tests.waiting import PATIENCE_S, wait_until

MESH_EXAMPLES = 10_000
MIN_EXAMPLES = 300  # of which some twenty are answered by the model
SLOW = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


def cases(schema: Any) -> st.SearchStrategy[Any]:
    """Make requests to every route; half of them, and half of the bodies, are valid."""
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) >= 6
    modes = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    made, bodies = [], []
    for operation in operations:
        for mode in modes:
            try:
                strategy = operation.as_strategy(generation_mode=mode)
                strategy.validate()
            except Exception:  # noqa: BLE001 - nothing about this route can be wrong: it takes no input
                continue
            made.append(strategy)
            if operation.body and mode is GenerationMode.POSITIVE:
                bodies.append(strategy)
    return st.one_of(made) | st.one_of(bodies)


@st.composite
def aimed(draw: st.DrawFn, made: st.SearchStrategy[Any], model: str) -> Any:
    """Make half of the requests name a served model, with few tokens and few other fields, so that some are valid."""
    try:
        case = draw(made)
    except InvalidSchema:  # it cannot make this request
        reject()
    body = case.body
    if isinstance(body, dict) and isinstance(body.get("model"), str) and draw(st.booleans()):
        plain = draw(st.booleans())
        kept = draw(st.sets(st.sampled_from(sorted(body)), max_size=1 if plain else 3))
        case.body = {name: value for name, value in body.items() if name in {"messages", "prompt", "input", *kept}}
        if plain:
            asked = {"messages": [{"role": "user", "content": "a"}], "prompt": "a", "input": "a"}
            case.body |= {name: value for name, value in asked.items() if name in body}
        case.body |= {"model": model, "max_tokens": 4}
    return case


def check(status: int, text: str, seen: Counter[int]) -> None:
    seen[status] += 1
    assert status < 500, text
    if status >= 400:
        assert '"error"' in text


@pytest.mark.timeout(1800)  # make fuzz has a hundred times as many examples
def test_no_request_of_the_schemas_is_answered_with_a_5xx() -> None:
    mesh = FakeMesh(tiny_text_model())
    app = create_app(mesh, mesh.text, FrontendSettings())
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)
    seen: Counter[int] = Counter()

    @settings(max_examples=max(MIN_EXAMPLES, settings().max_examples), deadline=None, suppress_health_check=SLOW)
    @given(case=aimed(cases(schema), MODEL))
    def ask(case: Any) -> None:
        answer = case.call()
        check(answer.status_code, answer.text, seen)

    ask()
    assert seen[200]
    assert seen[400]
    assert mesh.prompts, "some must get as far as the mesh"
    assert mesh.running == 0


def page(frontend: Worker) -> str:
    """Return its metrics page."""
    return httpx.get(f"{frontend.url}/metrics", timeout=PATIENCE_S).text


@pytest.mark.fuzz
@pytest.mark.mesh
@pytest.mark.timeout(1800)
def test_ten_thousand_requests_to_a_running_mesh_bring_no_5xx(mock_mesh: MeshProcesses) -> None:
    *_, frontend = mock_mesh.start("bootstrap", "prefill", "decode", "frontend")
    wait_until(lambda: httpx.get(f"{frontend.url}/v1/models", timeout=PATIENCE_S).json()["data"])
    schema = schemathesis.openapi.from_url(f"{frontend.url}/openapi.json")
    seen: Counter[int] = Counter()

    @settings(deadline=None, max_examples=MESH_EXAMPLES, suppress_health_check=SLOW, database=None)
    @given(case=aimed(cases(schema), "mock"))
    def ask(case: Any) -> None:
        answer = case.call()
        check(answer.status_code, answer.text, seen)

    ask()
    sys.stdout.write(f"{seen.total()} requests: {dict(sorted(seen.items()))}\n")
    assert seen.total() >= MESH_EXAMPLES
    counted = re.findall(
        r'^kvmesh_requests_total{model_name="mock".*status="200"} (\S+)$', page(frontend), re.MULTILINE
    )
    assert sum(map(float, counted)) > MESH_EXAMPLES / 50, "some must get as far as the mesh"
    good = {"model": "mock", "prompt": "a", "max_tokens": 3, "ignore_eos": True}
    assert httpx.post(f"{frontend.url}/v1/completions", json=good, timeout=PATIENCE_S).status_code == 200
    assert all(worker.popen.poll() is None for worker in mock_mesh.workers)
