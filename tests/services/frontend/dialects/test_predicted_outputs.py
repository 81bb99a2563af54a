"""`prediction` of chat completions: it goes to decode as tokens, and the usage says how much of it was right."""

import json
from typing import Any, Final

import httpx
import pytest

from tests.services.frontend.fake_mesh import CONTEXT, MODEL, FakeMesh

pytestmark = pytest.mark.anyio
CHAT: Final = "/v1/chat/completions"
HELLO: Final[dict[str, Any]] = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}


def predicted(content: object) -> dict[str, Any]:
    return {**HELLO, "prediction": {"type": "content", "content": content}}


@pytest.mark.parametrize(
    ("content", "joined"),
    [
        ("The capital", "The capital"),
        ([{"type": "text", "text": "The"}, {"type": "text", "text": "capital"}], "The\ncapital"),
        ("", ""),
    ],
)
async def test_a_prediction_becomes_tokens(
    http: httpx.AsyncClient, mesh: FakeMesh, content: object, joined: str
) -> None:
    answer = await http.post(CHAT, json=predicted(content))
    assert answer.status_code == 200
    assert list(mesh.prompts[0].prediction) == mesh.text._encode(joined, add_special_tokens=False)
    await http.post(CHAT, json=HELLO)
    assert list(mesh.prompts[1].prediction) == []
    assert mesh.prompts[0].token_ids == mesh.prompts[1].token_ids


@pytest.mark.parametrize("n", [1, 3])
async def test_the_usage_has_right_and_wrong_guesses_of_all_choices(
    http: httpx.AsyncClient, mesh: FakeMesh, n: int
) -> None:
    mesh.draft_counts = [(3, 1), (5, 2)]
    answer = (await http.post(CHAT, json={**predicted("The capital"), "n": n})).json()
    details = answer["usage"]["completion_tokens_details"]
    expected = {"reasoning_tokens": 0, "accepted_prediction_tokens": 2 * n, "rejected_prediction_tokens": 3 * n}
    assert details == expected
    options = {"stream": True, "stream_options": {"include_usage": True}}
    streamed = (await http.post(CHAT, json={**predicted("The capital"), "n": n, **options})).text
    last = json.loads(streamed.split("\n\n")[-3].removeprefix("data: "))
    assert last["usage"]["completion_tokens_details"] == expected
    plain = (await http.post(CHAT, json=HELLO)).json()
    assert plain["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


async def test_no_more_guesses_are_right_than_the_answer_has_tokens(http: httpx.AsyncClient, mesh: FakeMesh) -> None:
    """A stop string, or a stop token, ends it within the tokens of one step."""
    mesh.draft_counts, mesh.tokens_per_delta = [(7, 7)], 8
    usage = (await http.post(CHAT, json={**predicted("The"), "stop": "capital"})).json()["usage"]
    assert usage["completion_tokens_details"]["accepted_prediction_tokens"] <= usage["completion_tokens"] < 7


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ({"type": "content"}, "prediction.content"),
        ({"content": "The"}, "prediction.type"),
        ({"type": "text", "content": "The"}, "prediction.type"),
        ({"type": "content", "content": None}, "prediction.content"),
        ({"type": "content", "content": 7}, "prediction.content"),
        ({"type": "content", "content": []}, "prediction.content"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content[0].type"),
        ({"type": "content", "content": "The", "more": 1}, "prediction.more"),
        ("The", "prediction"),
        ({"type": "content", "content": "a b " * CONTEXT}, "prediction.content"),
    ],
)
async def test_a_bad_prediction_is_refused_by_name(
    http: httpx.AsyncClient, mesh: FakeMesh, prediction: object, param: str
) -> None:
    answer = await http.post(CHAT, json={**HELLO, "prediction": prediction})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert not mesh.prompts
