"""How a process leaves the group of its ranks, with a stand-in for NCCL."""

import threading
from collections.abc import Callable

import pytest
import torch.distributed as dist

from engine.sharding import group
from engine.sharding.group import abort_group, leave_group
from tests.waiting import PATIENCE_S


@pytest.fixture
def on_devices(monkeypatch: pytest.MonkeyPatch) -> Callable[[threading.Event], list[str]]:
    """A group over NCCL, whose abort ends when the event is set."""

    def make(graphs_are_free: threading.Event) -> list[str]:
        calls: list[str] = []

        def abort() -> None:
            calls.append("abort")
            assert graphs_are_free.wait(PATIENCE_S)
            calls.append("aborted")

        monkeypatch.setattr(dist, "is_initialized", lambda: "aborted" not in calls)
        monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
        monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append("destroy"))
        monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", abort)
        return calls

    return make


def test_a_lost_rank_is_reported_while_a_graph_holds_sums_of_the_group(
    on_devices: Callable[[threading.Event], list[str]],
) -> None:
    graphs_are_free = threading.Event()
    calls = on_devices(graphs_are_free)
    abort_group()
    abort_group()
    graphs_are_free.set()
    leave_group()
    assert calls == ["abort", "aborted"]
    leave_group()
    assert calls == ["abort", "aborted"], "there is no group any more"


def test_it_does_not_wait_for_ranks_that_have_ended(on_devices: Callable[[threading.Event], list[str]]) -> None:
    """NCCL's destroy waits for them."""
    graphs_are_free = threading.Event()
    graphs_are_free.set()
    calls = on_devices(graphs_are_free)
    leave_group()
    assert calls == ["abort", "aborted"]


def test_an_abort_that_does_not_end_holds_nothing_up_for_ever(
    on_devices: Callable[[threading.Event], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs_are_free = threading.Event()
    calls = on_devices(graphs_are_free)
    monkeypatch.setattr(group, "LEAVE_S", 0.05)
    leave_group()
    assert calls == ["abort"]
    graphs_are_free.set()
