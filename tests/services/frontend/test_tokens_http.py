"""`/tokenize` and `/detokenize`, whose shapes users of vLLM know."""

from typing import Any

import httpx
import pytest

from tests.services.frontend.fake_mesh import CONTEXT, MODEL, FakeMesh
from tests.services.frontend.test_bad_inputs import error_of

pytestmark = pytest.mark.anyio
HELLO = [{"role": "user", "content": "Hello"}]


async def tokens_of(http: httpx.AsyncClient, **body: Any) -> list[int]:
    answer = await http.post("/tokenize", json=body)
    assert answer.is_success, answer.text
    assert answer.json()["count"] == len(answer.json()["tokens"])
    return list(answer.json()["tokens"])


async def test_a_prompt_there_and_back(http: httpx.AsyncClient, mesh: FakeMesh) -> None:
    answer = (
        await http.post("/tokenize", json={"model": MODEL, "prompt": "Hello Paris", "return_token_strs": True})
    ).json()
    expected = mesh.text._encode("Hello Paris", add_special_tokens=True)
    assert (answer["tokens"], answer["max_model_len"]) == (expected, CONTEXT)
    assert len(answer["token_strs"]) == len(expected)
    assert (await http.post("/tokenize", json={"prompt": "Hello"})).json()["token_strs"] is None
    back = await http.post("/detokenize", json={"model": MODEL, "tokens": expected})
    assert back.json() == {"prompt": "Hello Paris"}
    assert (await http.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}


async def test_a_conversation_is_what_a_chat_would_send(http: httpx.AsyncClient, mesh: FakeMesh) -> None:
    await http.post("/v1/chat/completions", json={"model": MODEL, "messages": HELLO})
    sent = mesh.prompts[0].token_ids
    assert await tokens_of(http, messages=HELLO) == sent
    closed = await tokens_of(http, messages=HELLO, add_generation_prompt=False)
    assert sent[: len(closed)] == closed != sent
    begun = [*HELLO, {"role": "assistant", "content": "The capital"}]
    going_on = await tokens_of(http, messages=begun, continue_final_message=True)
    text = (await http.post("/detokenize", json={"tokens": going_on})).json()["prompt"]
    assert text.endswith("The capital")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        (
            "/tokenize",
            {"messages": HELLO, "add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message",
        ),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": 1}, "prompt"),
        ("/tokenize", {"messages": HELLO, "chat_template": "x"}, "chat_template"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [99999]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ],
)
async def test_a_wrong_request_is_400_with_param(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], param: str
) -> None:
    answer = await http.post(path, json=body)
    error = answer.json()["error"]
    error_of(answer, 400, error["code"], param)


async def test_another_model_is_404_and_none_503(http: httpx.AsyncClient, mesh: FakeMesh) -> None:
    error_of(await http.post("/tokenize", json={"model": "x", "prompt": "a"}), 404, "model_not_found", "model")
    mesh.served.clear()
    error_of(await http.post("/detokenize", json={"tokens": [1]}), 503, "no_instance")
