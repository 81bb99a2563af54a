"""A client that stops reading at any write, and leaves, reads on or never does: one end is sent, and nothing is kept."""

import asyncio
import json
from collections import Counter
from itertools import product
from typing import Any, Final

import pytest
from prometheus_client import CollectorRegistry
from starlette.types import Message

from components.errors import DecodeLost
from components.text.tokenizer import TextModel
from services.frontend.app import create_app
from services.frontend.config import FrontendSettings
from services.frontend.ports import ServedModel
from tests.faults.virtual_loop import run_virtually
from tests.services.frontend.fake_mesh import MODEL, FakeMesh
from tests.services.frontend.test_any_cut import APIS
from tests.services.frontend.thinking_model import CALL, thinking_model
from tests.waiting import PATIENCE_S

LIMIT_S: Final = 1.0  # of a request
SIZES: Final = (8, 40)  # tokens of a frame; with 40 the last one begins an item
ENDS: Final = {"[DONE]", "response.completed", "response.failed", "message_stop", "error"}


class Client:
    """Reads until its write number `stop`, then waits `pause_s` (None: without end) and reads on, or leaves."""

    def __init__(self, body: dict[str, Any], *, stop: int | None, pause_s: float | None, leaves: bool) -> None:
        self.got: list[bytes] = []
        self.statuses: list[int] = []
        self._stop, self._pause_s, self._leaves = stop, pause_s, leaves
        self.writes = 0
        self._inbox = asyncio.Queue[Message]()
        self._inbox.put_nowait({"type": "http.request", "body": json.dumps(body).encode(), "more_body": False})
        self._is_gone = False
        self._reads = asyncio.Event()
        self._reads.set()
        self.receive = self._inbox.get

    def _continue(self) -> None:
        self._is_gone = self._leaves
        if self._leaves:
            self._inbox.put_nowait({"type": "http.disconnect"})
        self._reads.set()

    async def send(self, message: Message) -> None:
        """As uvicorn does it: first wait for the client, and drop what one that has left would get."""
        if self.writes == self._stop and self._reads.is_set() and not self._is_gone:
            self._stop = None
            self._reads.clear()
            if self._pause_s is not None:
                asyncio.get_running_loop().call_later(self._pause_s, self._continue)
        await self._reads.wait()
        self.writes += 1
        if not self._is_gone:
            self.statuses.extend([message["status"]] if "status" in message else [])
            self.got.append(message.get("body", b""))

    def events(self) -> list[Any]:
        lines = b"".join(self.got).decode().split("\n")
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        return [{"type": one} if one == "[DONE]" else json.loads(one) for one in data]


def check(events: list[Any], *, whole: bool) -> None:
    kinds = [event.get("type", "error" if "error" in event else "chunk") for event in events]
    if whole:
        assert kinds[-1] in ENDS, kinds
    ends = Counter(kind for kind in kinds if kind in ENDS)
    assert ends["[DONE]"] + ends["response.completed"] + ends["response.failed"] + ends["message_stop"] <= 1
    finishes = [c["finish_reason"] for event in events for c in event.get("choices", ()) if c.get("finish_reason")]
    assert len(finishes) + ends["error"] <= 1
    numbers = [event["sequence_number"] for event in events if "sequence_number" in event]
    assert numbers == sorted(set(numbers))
    items = {
        what: [e["output_index"] for e in events if e.get("type") == f"response.output_item.{what}"]
        for what in ("added", "done")
    }
    assert items["added"] == list(range(len(items["added"])))
    assert items["done"] == items["added"][: len(items["done"])], "an item has ended that never began"
    for event in events:
        if "response" in event:
            ids = [item["id"] for item in event["response"]["output"]]
            assert len(ids) == len(set(ids)), "an item is there twice"


def shown(events: list[Any]) -> str:
    """The text of all deltas."""
    choices = [choice for event in events for choice in event.get("choices", ())]
    deltas = [event["delta"] for event in events if "delta" in event] + [
        choice.get("delta", choice) for choice in choices
    ]
    return "".join(
        delta if isinstance(delta, str) else delta.get("content") or delta.get("text") or "" for delta in deltas
    )


@pytest.fixture(scope="module")
def thinking() -> TextModel:
    return thinking_model()


@pytest.mark.parametrize("fails", [False, True], ids=["ends well", "fails"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("api", APIS)
def test_one_end_is_sent_and_nothing_is_kept(api: str, stream: bool, fails: bool, thinking: TextModel) -> None:
    """A response whose last events were not read in time had its last item twice, and items that ended without a begin."""
    path, body, _ = APIS[api]
    request = {"model": MODEL, **body, "stream": stream}

    async def test() -> None:
        for size in SIZES[: 1 if fails else 2]:
            await with_frames_of(size)

    async def with_frames_of(size: int) -> None:
        mesh = FakeMesh(thinking, answer=f"Hm.</think>See.{CALL}", served=[ServedModel(MODEL, 4096, 1)], pace_s=0.001)
        mesh.tokens_per_delta = size
        if fails:
            mesh.fail_at, mesh.failure = 3, DecodeLost("gone")
        registry = CollectorRegistry()
        settings = FrontendSettings(request_lines_per_s=0, request_timeout_s=LIMIT_S)
        app = create_app(mesh, thinking, settings, registry)

        async def run(stop: int | None, pause_s: float | None, *, leaves: bool) -> Client:
            client = Client(request, stop=stop, pause_s=pause_s, leaves=leaves)
            headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")]
            scope = {
                "type": "http",
                "method": "POST",
                "path": path,
                "headers": headers,
                "query_string": b"",
                "client": None,
            }
            async with asyncio.timeout(PATIENCE_S):
                await app(scope, client.receive, client.send)
            assert mesh.running == 0
            assert registry.get_sample_value("kvmesh_num_requests_running", {"model_name": MODEL}) == 0
            assert registry.get_sample_value("kvmesh_num_requests_waiting") == 0
            return client

        undisturbed = await run(None, None, leaves=False)
        for stop, pause_s, leaves in product(range(undisturbed.writes), (0.0, 0.5, LIMIT_S + 1, None), (False, True)):
            client = await run(stop, pause_s, leaves=leaves)
            in_time = not leaves and pause_s is not None and pause_s < LIMIT_S
            if client.statuses == [200] and stream:
                check(client.events(), whole=not leaves and pause_s is not None)
                if in_time:
                    assert shown(client.events()) == shown(undisturbed.events()), "what a client reads late is not lost"
            elif in_time:
                json.loads(b"".join(client.got))
            else:
                assert len(client.statuses) <= 1

    run_virtually(test)
