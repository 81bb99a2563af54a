"""Schedules of faults: one at each message, write and state, and mixtures drawn from a seed."""

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any, Final

from tests.faults.faults import OF_MESSAGES, OF_WRITES, Do, Fault
from tests.faults.mesh_run import ROLES
from tests.faults.setup import varied

REQUEST: Final = ("generate.v5", "prefill.v6", "room-open.v2")
ANSWER: Final = ("generate-accepted.v1", "prefill-accepted.v2", "room-ok.v1")
TOLD: Final = ("room-pages.v2", "room-close.v2", "frame", "kv-events", "kv-dump-fetch.v1", "kv-dump-part.v1")
AFTER_FAILURE: Final = ("room-failed.v1",)  # only after a transfer has failed
AFTER_REFUSED_OFFER: Final = ("quiesce.v1", "quiet.v1")  # only after a failure that prefill itself did not report
AFTER_CLIENT: Final = ("cancel.v1", "quiesce.v1", "quiet.v1")  # only after a client has gone
MESSAGES: Final = (*REQUEST, *ANSWER, *TOLD)
ERRORS: Final = ("Overloaded", "PeerLost", "DeadlineExceeded", "InvariantBroken", "Rejected")
FIELDS: Final = {
    "generate.v5": ("epoch", "model", "deadline_unix_ms"),
    "prefill.v6": ("epoch", "decode_epoch", "decode_id", "deadline_unix_ms", "room", "stamp"),
    "room-open.v2": ("room", "request_id", "prefill_epoch", "decode_epoch", "deadline_unix_ms", "pages", "aux_slot"),
    "room-pages.v2": ("request_id", "room", "bootstrap_id", "decode_epoch", "pages", "aux_slot"),
    "room-close.v2": ("rooms",),
    "heartbeat.v1": ("epoch",),
}
STATES: Final = (  # the first state of each lifecycle has no transition: its message stands for it
    "message generate.v5",  # decode accepted
    "message prefill.v6",  # inbound prealloc
    "inbound transfer",
    "decode running",
    "decode ended",
    "message prefill-accepted.v2",  # prefill bootstrapping
    "prefill waiting",
    "prefill computing",
    "prefill inflight",
    "prefill done",
    "message room-open.v2",
    "inbound landed",
    "message kv-coming.v1",
    "message room-pages.v2",
    "message room-close.v2",
    "write pages",
    "write aux",
    "request reserved",
)
STATES_AFTER_FAILURE: Final = (
    "prefill failed",
    "inbound pinned",
    "inbound closed",
    "message room-failed.v1",
    "request held",
)
STATES_WITHOUT_TOKEN: Final = ("decode waiting",)
STATES_AFTER_LOSS: Final = ("inbound pinned",)
STATES_AFTER_CLIENT: Final = ("decode accepted to ended",)
DELAYS_S: Final = (0.05, 3.0, 12.0)  # within the time limits of all calls, of some, of none
AWAY_S, LONG_AWAY_S = 8.0, 60.0  # longer than a lease; longer than any time limit
STOP_S, LONG_STOP_S = 4.0, 9.0  # both longer than liveness allows; shorter and longer than a lease
A_TRANSFER_FAILS: Final = Fault(Do.WRITE_FAILS, "write pages")
AN_OFFER_IS_REFUSED: Final = Fault(Do.REFUSE, "message room-pages.v2", field="InvariantBroken")
NO_EARLY_TOKEN: Final = Fault(Do.DROP, "message kv-coming.v1", count=999)
A_PREFILL_IS_KILLED: Final = Fault(Do.KILL, "write pages", role="prefill")
A_CLIENT_LEAVES: Final = Fault(Do.CLIENT_GONE, "inbound transfer", after_s=0.0005)

QUEUES: Final[dict[str, Any]] = {
    "num_clients": 12,
    "over_s": 0.01,
    "counts": {"frontend": 1, "decode": 2, "prefill": 1, "bootstrap": 2},
}

# The prefill instance that is killed is then the one that writes.
ONE_PREFILL: Final[dict[str, Any]] = {"counts": {"frontend": 1, "decode": 2, "prefill": 1, "bootstrap": 2}}
# An instance is left for the second fault, and gets requests.
LASTS: Final[dict[str, Any]] = {"num_clients": 120, "over_s": 16.0}

Schedule = list[Fault]


def of_messages() -> Iterator[Schedule]:
    for kind in MESSAGES:
        yield from ([fault] for fault in _of_message(kind))
    for kind in AFTER_FAILURE:
        yield from ([A_TRANSFER_FAILS, fault] for fault in _of_message(kind))
    for kind in AFTER_REFUSED_OFFER:
        yield from ([AN_OFFER_IS_REFUSED, fault] for fault in _of_message(kind))
    for kind in AFTER_CLIENT:
        yield from ([A_CLIENT_LEAVES, fault] for fault in _of_message(kind))
    for do in (Do.DROP, Do.DELAY, Do.GARBLE):
        yield [Fault(do, "message heartbeat.v1", nth=3, count=60, amount=3.0)]
    yield [Fault(Do.ALTER, "message heartbeat.v1", nth=3, count=40, field="epoch")]


def _of_message(kind: str) -> Iterator[Fault]:
    at = f"message {kind}"
    for do in (Do.DROP, Do.GARBLE, Do.UNSENT):
        yield Fault(do, at)
    yield Fault(Do.DROP, at, count=4)
    for delay_s in DELAYS_S:
        yield Fault(Do.DELAY, at, amount=delay_s)
    for delay_s in (0.0, 1.0):
        yield Fault(Do.DUPLICATE, at, amount=delay_s)
    if kind in (*REQUEST, "quiesce.v1"):
        yield Fault(Do.NOBODY, at)
        for error in ERRORS:
            yield Fault(Do.REFUSE, at, field=error)
    for field in FIELDS.get(kind, ()):
        yield Fault(Do.ALTER, at, field=field)


def of_writes() -> Iterator[Schedule]:
    for kind in ("pages", "aux"):
        at = f"write {kind}"
        for nth in (1, 2, 4):
            yield [Fault(Do.WRITE_FAILS, at, nth)]
            for delay_s in DELAYS_S:
                late = Fault(Do.WRITE_LATE, at, nth, amount=delay_s)
                yield [late]
                yield [late, Fault(Do.CLIENT_GONE, at, nth, after_s=delay_s / 2)]
                yield [late, Fault(Do.KILL, at, nth, role="decode", after_s=delay_s / 2)]
    for nth in (1, 3):
        yield [Fault(Do.WRITE_SILENT, "write aux", nth)]
        yield [Fault(Do.WRITE_STAMP, "write aux", nth)]
        yield [Fault(Do.WRITE_CORRUPT, "write aux", nth)]
    for nth in (1, 2, 4):
        yield [Fault(Do.WRITE_CORRUPT, "write pages", nth)]


def of_states() -> Iterator[Schedule]:
    for at in STATES:  # rooms are closed some milliseconds later, when all clients may have their answers
        yield from ([fault] for fault in _at_state(at) if (at, fault.do) != ("message room-close.v2", Do.CLIENT_GONE))
    for at in STATES_AFTER_FAILURE:
        yield from ([A_TRANSFER_FAILS, fault] for fault in _at_state(at) if fault.do not in (Do.LEASE, Do.DRAIN))
    for at in STATES_WITHOUT_TOKEN:
        faults = (fault for fault in _at_state(at) if fault.do not in (Do.LEASE, Do.DRAIN))
        yield from ([NO_EARLY_TOKEN, A_TRANSFER_FAILS, fault] for fault in faults)
    for at in STATES_AFTER_LOSS:
        faults = (fault for fault in _at_state(at) if fault.do is not Do.LEASE)
        # it needs another prefill that is asked in the same moment
        yield from ([A_PREFILL_IS_KILLED, f] for f in faults if (f.do, f.role) != (Do.STEPS_FAIL, "prefill"))
    for at in STATES_AFTER_CLIENT:
        yield from ([A_CLIENT_LEAVES, fault] for fault in _at_state(at) if fault.do is not Do.CLIENT_GONE)


def _at_state(at: str) -> Iterator[Fault]:
    for role in ROLES:
        yield Fault(Do.KILL, at, role=role)
        yield Fault(Do.STOP, at, amount=STOP_S, role=role)
    for role in ("decode", "prefill"):
        yield Fault(Do.STOP, at, amount=LONG_STOP_S, role=role)
        yield Fault(Do.LEASE, at, role=role)
        yield Fault(Do.DRAIN, at, role=role)
    for role in ("decode", "prefill"):
        yield Fault(Do.STEPS_FAIL, at, role=role)
    for role in ("decode", "bootstrap"):
        yield Fault(Do.HANG, at, amount=STOP_S, role=role)
    for role in ROLES:
        yield Fault(Do.CUT_OFF, at, amount=AWAY_S, role=role)
    yield Fault(Do.NATS_AWAY, at, amount=1.0)
    yield Fault(Do.ETCD_AWAY, at, amount=8.0)
    yield Fault(Do.ETCD_AWAY, at, amount=LONG_AWAY_S)
    yield Fault(Do.CLIENT_GONE, at)


def conditions(schedule: Schedule) -> tuple[int, dict[str, Any]]:
    """Return the seed and the arguments of `check` for a schedule."""
    seed = sum(map(ord, named(schedule)))
    setup = varied(seed, schedule)
    changes = {"setup": setup}
    if any(fault.at == "prefill waiting" for fault in schedule):
        changes |= QUEUES
    if schedule[0] is A_PREFILL_IS_KILLED:
        changes |= LASTS if schedule[-1].role == "prefill" else ONE_PREFILL
    if (schedule[-1].at, schedule[-1].do) == ("inbound closed", Do.CLIENT_GONE):  # some client must still wait
        changes |= QUEUES
    return seed, changes


def named(schedule: Schedule) -> str:
    """Return the name of its test."""
    return " then ".join(str(fault) for fault in schedule)


def mixture(seed: int) -> Schedule:
    """Draw three to six faults. The first one fires in every run."""
    draw = Random(seed)
    certain = [replace(fault, nth=draw.randint(1, 4)) for fault in _of_message("generate.v5")]
    return [draw.choice(certain), *(_anything(draw) for _ in range(draw.randint(2, 5)))]


def _anything(draw: Random) -> Fault:
    chosen = draw.choice(draw.choice(_SINGLE))
    if chosen.do in OF_MESSAGES + OF_WRITES:
        return replace(chosen, nth=draw.randint(1, 4))
    return replace(chosen, nth=draw.randint(1, 4), which=draw.randint(0, 1), after_s=draw.choice((0.0, 0.002, 0.02)))


_SINGLE: Final = [
    [fault for schedule in schedules() for fault in schedule] for schedules in (of_messages, of_writes, of_states)
]
