"""The queue in shared memory: every message arrives whole and in order, whatever its size."""

import os
import random
import threading
from collections.abc import Iterator

import pytest

from engine.parallel.step_line import LineBroken, StepLine

SIZE = 3
RING = 1 << 12
NEVER = threading.Event()


@pytest.fixture
def line() -> Iterator[StepLine]:
    made = StepLine.make(SIZE, RING)
    yield made
    made.close()


def far_end(line: StepLine) -> StepLine:
    """Map it like another process."""
    return StepLine(SIZE, os.dup(line.memory), [os.dup(waker) for waker in line.wakers], RING)


@pytest.mark.parametrize("spin_s", [0.0, 1e-3])
def test_messages_arrive_whole_and_in_order_at_each_follower(line: StepLine, spin_s: float) -> None:
    draw = random.Random(1)
    messages = [draw.randbytes(draw.choice((0, 1, 40, 900, RING - 8))) for _ in range(300)]
    found: dict[int, list[bytes]] = {}

    def follow(rank: int) -> None:
        end = far_end(line)
        found[rank] = [end.receive(rank, spin_s) for _ in messages]
        end.close()

    threads = [threading.Thread(target=follow, args=(rank,)) for rank in (1, 2)]
    for thread in threads:
        thread.start()
    for message in messages:
        line.send(message, NEVER)
    for thread in threads:
        thread.join()
    assert found == {1: messages, 2: messages}


def test_a_message_is_done_when_the_follower_asks_for_the_next(line: StepLine) -> None:
    ends = [far_end(line), far_end(line)]
    assert line.is_done()
    line.send(b"one", NEVER)
    for rank, end in enumerate(ends, 1):
        assert end.receive(rank, 0.0) == b"one"
        assert not line.is_done()
    line.send(b"two", NEVER)
    for rank, end in enumerate(ends, 1):
        assert end.receive(rank, 0.0) == b"two"
    assert not line.is_done(), "the second is not"
    for end in ends:
        end.close()


def test_a_full_line_ends_when_the_followers_have(line: StepLine) -> None:
    """Otherwise the leader would wait forever."""
    over = threading.Event()
    over.set()
    line.send(bytes(RING - 8), over)
    with pytest.raises(LineBroken, match="ended"):
        line.send(b"more", over)


def test_what_the_line_cannot_hold_is_refused(line: StepLine) -> None:
    with pytest.raises(LineBroken, match=f"a step of {RING} bytes is too long"):
        line.send(bytes(RING), NEVER)
