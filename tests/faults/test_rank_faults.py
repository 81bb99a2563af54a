"""Prefill and decode on unequal numbers of ranks, each rank with its own pages and transfers.

Each KV head of each rank has its own marks of the mock: lost or misplaced bytes give wrong tokens or a failed step.
`memory_transfer` notices bytes that are written twice.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
from _pytest.mark import ParameterSet
from msgspec import structs

from components.kv_transfer import pieces, writes
from components.kv_transfer.writes import targets
from components.wire.instances import KvEndpoint
from components.wire.layout import KvLayout
from tests.faults.faults import Do, Fault
from tests.faults.mesh_run import check, run_faults
from tests.faults.schedules import Schedule, conditions, named, of_messages, of_states, of_writes
from tests.faults.setup import EQUAL, LARGE_TO_SMALL, SMALL_TO_LARGE, Setup

# ranks of prefill and of decode, and KV heads; with fewer heads than ranks, several ranks have the same head
RANKS: Final = (
    ((2, 1), 2),
    ((1, 2), 2),
    ((2, 4), 4),
    ((4, 2), 2),
    ((2, 2), 2),
    ((4, 1), 4),
    ((2, 4), 2),
    ((1, 2), 3),
    ((3, 2), 5),
)
LOSSES: Final = ("write pages", "write aux", "decode running", "prefill computing", "inbound transfer", "message frame")
EVERY: Final = 60  # `make test` runs one schedule of so many, and `make faults` all of them


def _thinned() -> Iterator[ParameterSet]:
    for number, schedule in enumerate((*of_messages(), *of_writes(), *of_states())):
        marks = [] if number % EVERY == 0 else [pytest.mark.faults]
        yield pytest.param(schedule, id=named(schedule), marks=marks)


@pytest.mark.parametrize("sizes", [EQUAL, SMALL_TO_LARGE, LARGE_TO_SMALL], ids=str)
@pytest.mark.parametrize(("ranks", "kv_heads"), RANKS, ids=str)
def test_every_token_is_right_and_each_byte_is_written_once(
    home: Path, ranks: tuple[int, int], kv_heads: int, sizes: tuple[int, int]
) -> None:
    outcome = check(home, 1, [], setup=Setup(page_sizes=sizes, ranks=ranks, kv_heads=kv_heads))
    assert not any(client.error for client in outcome.clients)
    assert not outcome.counts["recomputes"]
    assert sum("write of pages" in line for line in outcome.trace) >= 3 * max(ranks) // (1 + (kv_heads < max(ranks)))


@pytest.mark.parametrize("schedule", [*_thinned()])
def test_ranks_change_nothing_about_faults(home: Path, schedule: list[Fault]) -> None:
    seed, changes = conditions(schedule)
    ranks, kv_heads = RANKS[seed % len(RANKS)]
    changes["setup"] = replace(changes["setup"], ranks=ranks, kv_heads=kv_heads)
    outcome = check(home, seed, schedule, **changes)
    assert set(outcome.fired) == set(schedule)


@pytest.mark.parametrize("at", LOSSES)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_instance_that_loses_a_rank_ends_and_its_requests_are_answered(home: Path, role: str, at: str) -> None:
    schedule: Schedule = [Fault(Do.RANK_LOST, at, 2, role=role)]
    outcome = check(home, 6, schedule, setup=Setup(ranks=(2, 4), kv_heads=4), num_clients=12)
    assert outcome.fired == schedule
    assert [type(error).__name__ for error in outcome.died.values()] == ["RankLost"]
    assert not any(client.error for client in outcome.clients)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_what_a_lost_rank_had_on_its_way_hits_nobody(home: Path, role: str, seed: int) -> None:
    """Decode may reuse the pages of a transfer only when no byte can land any more."""
    late = Fault(Do.WRITE_LATE, "write pages", 4, amount=2.0)  # the first of the rank that is lost
    lost = Fault(Do.RANK_LOST, "write pages", 4, role=role, after_s=0.01)
    counts = {"frontend": 1, "decode": 1, "prefill": 1, "bootstrap": 1}
    setup = Setup(ranks=(4, 2), kv_heads=4)
    outcome = check(home, seed, [late, lost], setup=setup, counts=counts, num_clients=60, over_s=6.0)
    assert lost in outcome.fired


def _loses_a_rank(ours: KvLayout, peer: KvEndpoint) -> list[KvEndpoint]:
    return targets(ours, peer)[:-1] or targets(ours, peer)


def _swaps_ranks(ours: KvLayout, peer: KvEndpoint) -> list[KvEndpoint]:
    ranks = targets(ours, peer)
    layouts = [rank.layout for rank in reversed(ranks)]
    return [structs.replace(rank, layout=layout) for rank, layout in zip(ranks, layouts, strict=True)]


def _copies_every_head(ours: KvLayout, theirs: KvLayout) -> range:
    return range(max(ours.heads.start, theirs.heads.start), min(ours.heads.stop, theirs.heads.stop))


@pytest.mark.parametrize(
    ("name", "wrong", "ranks", "seen"),
    [
        ("targets", _loses_a_rank, (1, 2), ""),
        ("targets", _swaps_ranks, (1, 2), ""),
        ("shared_heads", _copies_every_head, (4, 1), "wrote again"),
    ],
    ids=["lost", "misplaced", "doubled"],
)
def test_wrong_bytes_are_seen(
    home: Path,
    name: str,
    wrong: Callable[..., object],
    ranks: tuple[int, int],
    seen: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So the tests above can fail."""
    for module in (writes, pieces):
        monkeypatch.setattr(module, name, wrong, raising=module is writes)
    problems = run_faults(home, 1, [], setup=Setup(ranks=ranks, kv_heads=2)).problems
    assert any(seen in problem for problem in problems)
