"""Runs with various settings: page sizes, verification, the policy after a failure, adapters, queues."""

from pathlib import Path
from typing import Any, Final

import pytest

from tests.faults.faults import Do, Fault
from tests.faults.limits import limit_of
from tests.faults.mesh_run import Outcome, check, run_faults
from tests.faults.schedules import NO_EARLY_TOKEN
from tests.faults.setup import ADAPTER, POOL_TOKENS, SLOW_STEP_S, Adapters, Setup

CORRUPTED: Final = {
    "pages": ([Fault(Do.WRITE_CORRUPT, "write pages", 2)], "pages did not arrive as prefill sent them: "),
    "aux": ([Fault(Do.WRITE_CORRUPT, "write aux", 2)], "the aux slot was corrupted on its way from prefill"),
}
A_TRANSFER_FAILS: Final = [Fault(Do.WRITE_FAILS, "write pages", 2)]
ONE_PREFILL: Final[dict[str, Any]] = {"counts": {"frontend": 1, "decode": 2, "prefill": 1, "bootstrap": 1}}
BUSY: Final[dict[str, Any]] = {"num_clients": 24, "over_s": 2.0}
QUEUES: Final[dict[str, Any]] = {**ONE_PREFILL, **BUSY}
QUEUED_S: Final = 7.0  # a prompt's wait in the queue, without any fault


def _traced(outcome: Outcome, words: str) -> int:
    return sum(words in line for line in outcome.trace)


@pytest.mark.parametrize("sizes", [(16, 32), (32, 16), (16, 128), (64, 16)])
def test_pages_of_another_size_are_written_in_pieces(home: Path, sizes: tuple[int, int]) -> None:
    outcome = check(home, 1, [], setup=Setup(page_sizes=sizes))
    assert _traced(outcome, "write of pages") >= 3
    assert not any(client.error for client in outcome.clients)


@pytest.mark.parametrize("sizes", [(16, 16), (16, 32), (64, 16)])
def test_pages_that_every_layer_has_left_are_not_written(home: Path, sizes: tuple[int, int]) -> None:
    whole, windowed = (check(home, 1, [], setup=Setup(page_sizes=sizes, window=window)) for window in (None, 32))
    assert not any(client.error for client in windowed.clients)
    assert 0 < windowed.counts["bytes"] < whole.counts["bytes"]


@pytest.mark.parametrize("sizes", [(16, 16), (16, 32)])
def test_evicted_pages_that_come_back_are_sent_and_continued(home: Path, sizes: tuple[int, int]) -> None:
    restored = 0
    for seed in range(4):
        outcome = check(
            home, seed, [], setup=Setup(page_sizes=sizes, offloaded_tokens=POOL_TOKENS, verify_kv=True), **BUSY
        )
        assert not any(client.error for client in outcome.clients)
        restored += outcome.counts["restored"]
    assert restored > 0


@pytest.mark.parametrize("what", CORRUPTED)
@pytest.mark.parametrize(("http", "seals"), [(False, True), (True, True), (False, False)])
def test_corrupted_kv_is_computed_anew_and_its_cause_is_named(home: Path, what: str, http: bool, seals: bool) -> None:
    schedule, cause = CORRUPTED[what]
    outcome = check(home, 2, schedule, setup=Setup(verify_kv=True, http=http, seals=seals))
    assert not any(client.error for client in outcome.clients)
    assert outcome.counts["corrupt"] == outcome.counts["recomputes"] == 1
    assert sum("computing the prompt here" in line and cause in line for line in outcome.trace) == 1


@pytest.mark.parametrize("what", CORRUPTED)
def test_corrupted_kv_fails_its_request_alone_where_that_is_asked_for(home: Path, what: str) -> None:
    schedule, cause = CORRUPTED[what]
    outcome = check(home, 2, schedule, setup=Setup(verify_kv=True, on_transfer_failure="fail"))
    (error,) = (client.error for client in outcome.clients if client.error)
    assert cause in error.message
    assert error.fields["cause"] == "KvCorrupt"


@pytest.mark.parametrize("what", CORRUPTED)
def test_without_verification_corrupted_kv_shows(home: Path, what: str) -> None:
    """So the two tests above can fail. Without its message, the first token comes from the aux slot."""
    schedule = [NO_EARLY_TOKEN, *CORRUPTED[what][0]]
    assert any(run_faults(home, seed, schedule, setup=Setup(seals=False)).problems for seed in range(2, 10))


def test_a_damaged_aux_slot_is_noticed_by_its_seal_without_verification(home: Path) -> None:
    schedule, cause = CORRUPTED["aux"]
    outcome = check(home, 2, schedule)
    assert not any(client.error for client in outcome.clients)
    assert outcome.counts["corrupt"] == outcome.counts["recomputes"] == 1
    assert _traced(outcome, cause) == 1


@pytest.mark.parametrize("http", [False, True])
def test_one_clear_error_stands_where_recompute_would_have_gone_on(home: Path, http: bool) -> None:
    recomputed = check(home, 3, A_TRANSFER_FAILS, setup=Setup(http=http))
    assert recomputed.counts["recomputes"] == 1
    assert not any(client.error for client in recomputed.clients)
    failed = check(home, 3, A_TRANSFER_FAILS, setup=Setup(on_transfer_failure="fail", http=http))
    assert failed.counts["recomputes"] == 0
    (client,) = (client for client in failed.clients if client.error)
    assert client.lacks_kv
    if http:
        assert getattr(client, "status") == 502  # noqa: B009


def test_streams_that_have_begun_go_on_when_failures_are_asked_for(home: Path) -> None:
    """Their decode instance dies, and all later transfers fail."""
    schedule = [Fault(Do.KILL, "decode running", 3, role="decode"), Fault(Do.WRITE_FAILS, "write pages", 8, count=999)]
    setup = Setup(on_transfer_failure="fail", http=True)
    outcomes = [check(home, seed, schedule, setup=setup, num_clients=10) for seed in range(3)]
    assert any(outcome.counts["recomputes"] for outcome in outcomes), "none had begun"


@pytest.mark.parametrize(
    ("adapters", "why"),
    [
        ("everywhere", ""),
        ("on decode alone", ""),
        ("other weights on prefill", f"must load the same weights as adapter '{ADAPTER}'"),
    ],
)
def test_an_adapter_answers_wherever_its_kv_can_come_from(home: Path, adapters: Adapters, why: str) -> None:
    outcome = check(home, 4, [], setup=Setup(adapters=adapters, http=True))
    assert any(client.adapter for client in outcome.clients)
    assert not any(client.error for client in outcome.clients)
    assert _traced(outcome, why or "write of pages")


def test_streams_with_an_adapter_wait_for_an_instance_that_has_it(home: Path) -> None:
    schedule = [Fault(Do.KILL, "decode running", 4, role="decode")]  # the first instance, which has the adapter
    outcomes = [check(home, seed, schedule, setup=Setup(adapters="on every other decode")) for seed in range(3)]
    moved = [c for outcome in outcomes for c in outcome.clients if c.adapter and not c.error]
    assert len(moved) >= 3


@pytest.mark.parametrize(
    "schedule",
    [
        [],
        [Fault(Do.STOP, "time 1.0", amount=4.0, role="prefill")],
        [Fault(Do.KILL, "time 1.0", role="prefill")],
        [Fault(Do.GARBLE, "message heartbeat.v1", 8, count=60)],
        [Fault(Do.ALTER, "message heartbeat.v1", 8, count=60, field="queued_tokens")],
        [Fault(Do.WRITE_FAILS, "write pages", 3, count=5), Fault(Do.CLIENT_GONE, "prefill computing", 6)],
        [Fault(Do.KILL, "time 1.5", role="decode"), Fault(Do.NATS_AWAY, "time 2.0", amount=1.0)],
    ],
    ids=str,
)
def test_long_queues_at_prefill_send_prompts_to_decode(home: Path, schedule: list[Fault]) -> None:
    limit = limit_of(schedule)
    silent = any("heartbeat" in fault.at for fault in schedule)  # for over two seconds: then streams move
    moves = QUEUES["num_clients"] if silent else limit.moves
    load = {**QUEUES, "limit": limit._replace(silence_s=limit.silence_s + QUEUED_S, moves=moves)}
    outcome = check(home, 5, schedule, setup=Setup(prefill_step_s=SLOW_STEP_S), **load)
    assert set(outcome.fired) == set(schedule)
    if not schedule:
        patient = Setup(prefill_step_s=SLOW_STEP_S, local_prefill_on_queue=False)
        assert _computed_here(outcome) > _computed_here(check(home, 5, [], setup=patient, **load)) + 3


def _computed_here(outcome: Outcome) -> int:
    """The number of prompts that were sent to no prefill instance."""
    moves = [line.split()[1:] for line in outcome.trace]
    waited, sent = ({m[1] for m in moves if (m[0], m[-1]) == ("decode", state)} for state in ("waiting", "prealloc"))
    return len(waited - sent)


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize(
    "refusal",
    [
        Fault(Do.REFUSE, "message prefill.v6", 2, field="Overloaded"),
        Fault(Do.REFUSE, "message prefill.v6", 2, field="StaleInstance"),
        Fault(Do.NOBODY, "message prefill.v6", 2),
    ],
    ids=str,
)
def test_a_prompt_that_one_prefill_instance_refuses_is_computed_by_the_other(
    home: Path, refusal: Fault, asks: bool
) -> None:
    outcome = check(home, 6, [refusal], setup=Setup(asks=asks))
    assert outcome.fired == [refusal]
    assert not any(client.error for client in outcome.clients)
    assert outcome.counts["recomputes"] == 0
    alone = check(home, 6, [refusal], setup=Setup(asks=asks), **ONE_PREFILL)
    assert alone.counts["recomputes"] == 1
