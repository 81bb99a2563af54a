"""By HTTP: a response ends exactly once, with its whole answer or with one error; never with both, neither, or two."""

from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

import pytest

from tests.faults.clients import Answer
from tests.faults.faults import Do, Fault
from tests.faults.http_client import HttpClient
from tests.faults.limits import ANYTHING
from tests.faults.mesh_run import check
from tests.faults.setup import Setup

HTTP: Final = Setup(http=True)
ALL: Final = 10**6
CLIENTS: Final = (Do.CLIENT_GONE, Do.CLIENT_GONE, Do.CLIENT_STALLS)
MESH: Final = (
    Fault(Do.KILL, "decode running", 2, role="decode"),
    Fault(Do.STOP, "decode running", 2, amount=4.0, role="decode"),
    Fault(Do.DRAIN, "decode running", 2, role="decode"),
    Fault(Do.NATS_AWAY, "decode running", 2, amount=1.0),
    Fault(Do.DROP, "message frame", 5, count=3),
    Fault(Do.UNSENT, "message frame", 5, count=3),
    Fault(Do.STOP, "decode running", 2, amount=4.0, role="frontend"),
)


@pytest.mark.parametrize("mesh", MESH, ids=str)
def test_clients_leave_and_stop_reading_while_the_mesh_fails(home: Path, mesh: Fault) -> None:
    seed = MESH.index(mesh)
    draw = Random(seed)
    schedule = [
        Fault(do, f"time {0.35 * draw.random():.4f}", amount=3.0, which=draw.randrange(4))
        for do in (*CLIENTS, *CLIENTS)
    ]
    outcome = check(home, seed, [*schedule, mesh], setup=HTTP, num_clients=12)
    assert mesh in outcome.fired
    assert any(client.has_left for client in outcome.clients)


def test_an_error_after_the_first_token_is_the_streams_last_event(home: Path) -> None:
    """All frames are lost, so every request reaches its time limit."""
    lost = [Fault(Do.DROP, "message frame", 12, count=ALL)]
    outcome = check(home, 1, lost, setup=HTTP, limit=ANYTHING)
    late = [c for c in outcome.clients if c.error]
    assert {c.error["code"] for c in late} == {"deadline_exceeded"}
    assert any(isinstance(c, HttpClient) and c.status == 200 for c in late), "none had begun"
    assert any(isinstance(c, HttpClient) and c.status == 504 for c in late), "all had begun"


def test_decode_is_notified_that_a_client_has_left(home: Path) -> None:
    outcome = check(home, 1, [Fault(Do.CLIENT_GONE, "decode running", 3)], setup=HTTP)
    assert sum("cancel.v1" in line for line in outcome.trace) == 1


@pytest.mark.parametrize("at", ["decode running", "decode ended"])
@pytest.mark.parametrize("seed", [3, 4, 5])
def test_a_client_that_reads_nothing_until_after_the_time_limit_gets_an_error(home: Path, at: str, seed: int) -> None:
    """Even if only the end of its answer is still unread."""
    schedule = [Fault(Do.CLIENT_STALLS, at, amount=28.0)]
    outcome = check(home, seed, schedule, setup=HTTP)
    assert outcome.fired == schedule
    assert [c.error["code"] for c in outcome.clients if c.error] == ["deadline_exceeded"]


# the checks themselves

OK: Final = b'data: {"choices":[{"index":0,"text":"ab","finish_reason":null}]}\n\n'
END: Final = b'data: {"choices":[{"index":0,"text":"","finish_reason":"length"}]}\n\n'
ERROR: Final = b'data: {"error":{"message":"lost","code":"instance_lost"}}\n\n'
DONE: Final = b"data: [DONE]\n\n"


@dataclass
class _EndedTask:
    def done(self) -> bool:
        return True

    def cancelled(self) -> bool:
        return False

    def exception(self) -> None:
        return None


@pytest.mark.parametrize(
    ("body", "is_right"),
    [
        (OK + END + DONE, True),
        (OK + ERROR + DONE, True),
        (OK + END, False),
        (OK + DONE, False),
        (OK + ERROR, False),
        (OK + END + ERROR + DONE, False),
        (OK + ERROR + ERROR + DONE, False),
        (OK + END + END + DONE, False),
        (OK + END + DONE + DONE, False),
        (OK + ERROR + END + DONE, False),
        (END + DONE, False),
        (OK + OK + END + DONE, False),
    ],
)
def test_a_stream_that_does_not_end_exactly_once_is_noticed(body: bytes, is_right: bool) -> None:
    client: Any = HttpClient(0, [[97]], None, 0.0, 1.0)
    client.task, client.status, client._received, client._is_over = _EndedTask(), 200, body, True
    client._headers = {"content-type": "text/event-stream"}
    problems = client.problems([Answer([97, 98], "length")], broken=False)
    assert bool(problems) is not is_right
