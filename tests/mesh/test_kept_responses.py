"""Responses and messages over real processes: a frontend finds the responses that a killed one stored."""

from contextlib import suppress

import pytest
from anthropic import Anthropic
from openai import NotFoundError, OpenAI
from openai.types.responses import Response

from tests.mesh.harness import MeshProcesses
from tests.mesh.mocks import MODEL
from tests.waiting import wait_until

pytestmark = pytest.mark.mesh


def until_over(client: OpenAI, response_id: str) -> Response:
    wait_until(lambda: client.responses.retrieve(response_id).status != "in_progress")
    return client.responses.retrieve(response_id)


def test_responses_outlive_their_frontend(mock_mesh: MeshProcesses) -> None:
    pace = {
        "MESH_ENGINE__MOCK__SPEEDUP": "1",
        "MESH_ENGINE__MOCK__STEP_S": "0.01",
        "MESH_ENGINE__MOCK__ANSWER_TOKENS": "0",
    }
    mock_mesh.start("bootstrap", "prefill", "decode", **pace)
    first, second = mock_mesh.start("frontend", "frontend")
    here, there = (OpenAI(base_url=f"{w.url}/v1", api_key="mine", max_retries=0) for w in (first, second))
    with Anthropic(base_url=second.url, api_key="mine") as anthropic:
        wait_until(lambda: first.models() and second.models())
        message = anthropic.messages.create(model=MODEL, max_tokens=5, messages=[{"role": "user", "content": "Hello"}])
        assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 5)

    whole = here.responses.create(model=MODEL, input="Hello", max_output_tokens=8)
    assert there.responses.retrieve(whole.id).output_text == whole.output_text != ""
    going = here.responses.create(model=MODEL, input="And then?", max_output_tokens=2000, background=True)
    brief = here.responses.create(model=MODEL, input="And then?", max_output_tokens=3, background=True)
    assert until_over(there, brief.id).status == "incomplete"
    assert there.responses.retrieve(going.id).status == "in_progress"
    assert there.responses.cancel(going.id).status == "cancelled"

    lost = here.responses.create(model=MODEL, input="Hello", max_output_tokens=300, background=True)
    first.kill()
    found = until_over(there, lost.id)
    assert found.status == "failed"
    assert found.error is not None
    assert found.error.code == "server_error"
    after = there.responses.create(model=MODEL, input="Go on.", max_output_tokens=4, previous_response_id=whole.id)
    assert after.usage is not None
    assert whole.usage is not None
    assert after.usage.input_tokens > whole.usage.input_tokens + 8
    there.responses.delete(whole.id)
    with pytest.raises(NotFoundError):
        there.responses.retrieve(whole.id)
    for client in (here, there):
        with suppress(OSError):
            client.close()
