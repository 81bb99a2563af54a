"""The most that each kind of fault may cost clients. A run beyond its limits fails."""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Final, NamedTuple

from tests.faults.faults import OF_MESSAGES, Do, Fault
from tests.faults.setup import Setup

USUAL_S: Final = 0.3  # a client's longest silence without faults: it waits for pages
USUAL_STEPS: Final = 2  # and for this many steps


class Seen(NamedTuple):
    """The effects on the clients of one run. Those that left or stopped reading do not count."""

    silence_s: float  # the longest time without a token
    failed: int  # answers
    moves: int  # requests that left a healthy decode instance


class Limit(NamedTuple):
    """The most that one fault may cost all clients of a run together."""

    silence_s: float  # beyond the usual one
    failed: int = 0
    moves: int = 0


ANYTHING: Final = Limit(1e6, 1_000_000, 1_000_000)
NOTHING: Final = Limit(0.0)
MESSAGES: Final = {
    "generate": "a request to decode",
    "generate-accepted": "decode's answer",
    "prefill": "a request to prefill",
    "prefill-accepted": "prefill's answer",
    "room-open": "an offer of pages",
    "room-ok": "bootstrap's answer",
    "room-pages": "bootstrap's forwarded offer",
    "room-failed": "the report of a failed transfer",
    "frame": "a frame of tokens",
    "last-frame": "a stream's last frame",
    "heartbeat": "a heartbeat",
}
HAPPENS: Final = {
    Do.DROP: "is lost",
    Do.DUPLICATE: "arrives twice",
    Do.GARBLE: "is unreadable",
    Do.ALTER: "is altered",
    Do.REFUSE: "is refused",
    Do.UNSENT: "cannot be sent",
    Do.NOBODY: "has no listener",
}
OF_WRITES: Final = {
    Do.WRITE_FAILS: "a write of KV fails",
    Do.WRITE_LATE: "a write of KV arrives late",
    Do.WRITE_SILENT: "the end of a write is not noticed",
    Do.WRITE_STAMP: "an aux slot has a wrong stamp",
    Do.WRITE_CORRUPT: "a write of KV is corrupted",
}
OF_PROCESSES: Final = {
    Do.KILL: "is killed",
    Do.LEASE: "loses its lease",
    Do.DRAIN: "is drained",
    Do.STEPS_FAIL: "fails all its steps",
    Do.RANK_LOST: "loses a rank",
}
LASTING: Final = {
    Do.STOP: "is frozen for",
    Do.HANG: "hangs, with a live lease, for",
    Do.CUT_OFF: "cannot reach etcd for",
}


def kind_of(fault: Fault) -> str:
    """Return a fault in plain words: the name of its row."""
    if fault.do in OF_MESSAGES:
        tag = fault.at.removeprefix("message ").partition(".")[0]
        happens = HAPPENS.get(fault.do, f"arrives {fault.amount:g} s late")
        return f"{MESSAGES.get(tag, 'another message')} {happens}"
    if fault.do in OF_WRITES:
        return OF_WRITES[fault.do]
    if fault.do in OF_PROCESSES:
        return f"a {fault.role} {OF_PROCESSES[fault.do]}"
    if fault.do in LASTING:
        return f"a {fault.role} {LASTING[fault.do]} {fault.amount:g} s"
    match fault.do:
        case Do.NATS_AWAY:
            return f"NATS is unreachable for {fault.amount:g} s"
        case Do.ETCD_AWAY:
            return f"etcd is unreachable for {fault.amount:g} s"
        case _:
            return "a client leaves or stops reading"


IN_A_ROW: Final = 4
TRANSFER_S: Final = 8.0  # nodes.TRANSFER_TIMEOUT_S: then decode computes the prompt itself
NOTICED_S: Final = 2.5  # an instance that is silent is lost after two seconds
AGAIN_S: Final = 2.0  # a lost message is repeated within this time
# The first pattern that matches counts.
LIMITS: Final[dict[str, Limit]] = {
    "* arrives 0.05 s late": Limit(0.1),
    "* arrives 3 s late": Limit(3.0),
    "* arrives 12 s late": Limit(12.0, moves=2),
    "* arrives twice": Limit(1.0),  # its sender's next message waits for the second copy
    "a request to decode is lost": Limit(AGAIN_S),
    "a request to decode is unreadable": Limit(0.2, failed=1, moves=1),
    "a request to decode is altered": Limit(0.2, failed=1, moves=1),
    "a request to decode is refused": Limit(0.2, failed=1, moves=1),
    "a request to decode cannot be sent": Limit(0.2, moves=1),
    "a request to decode has no listener": Limit(0.2, moves=1),
    "decode's answer is unreadable": Limit(AGAIN_S, failed=1, moves=1),
    "decode's answer *": Limit(AGAIN_S),
    "a frame of tokens *": Limit(AGAIN_S),
    "a stream's last frame *": Limit(AGAIN_S),
    "a request to prefill *": Limit(AGAIN_S),
    "prefill's answer *": Limit(AGAIN_S),
    "an offer of pages is altered": Limit(TRANSFER_S),
    "an offer of pages *": Limit(AGAIN_S),
    "bootstrap's answer *": Limit(AGAIN_S),
    "bootstrap's forwarded offer is altered": Limit(TRANSFER_S),
    "bootstrap's forwarded offer *": Limit(AGAIN_S),
    "the report of a failed transfer *": Limit(TRANSFER_S),
    "a heartbeat *": NOTHING,
    "another message *": NOTHING,
    "a write of KV arrives late": Limit(TRANSFER_S),
    "a write of KV is corrupted": Limit(1.0),
    "a write of KV fails": Limit(0.2),
    "an aux slot has a wrong stamp": Limit(0.2),
    "the end of a write is not noticed": Limit(TRANSFER_S),
    "a decode is killed": Limit(NOTICED_S),
    "a decode is frozen *": Limit(NOTICED_S),
    "a decode hangs*": Limit(NOTICED_S),
    "a decode fails all its steps": Limit(NOTICED_S),
    "a decode loses a rank": Limit(NOTICED_S),
    "a prefill is killed": Limit(NOTICED_S),
    "a prefill loses a rank": Limit(NOTICED_S),
    "a prefill is frozen for 4 s": Limit(4.0),  # requests wait for pages that it may still write into
    "a prefill is frozen for 9 s": Limit(9.0),
    "a prefill fails all its steps": Limit(NOTICED_S),
    "a bootstrap is killed": Limit(0.3),
    "a bootstrap is frozen *": Limit(0.3),
    "a bootstrap hangs*": Limit(0.3),
    "a frontend is frozen for 4 s": Limit(4.0),
    "a frontend is killed": NOTHING,  # its own clients do not count
    "a * is drained": NOTHING,
    "a * loses its lease": NOTHING,
    "a * cannot reach etcd *": NOTHING,
    "NATS is unreachable for 1 s": Limit(1.0 + AGAIN_S),
    "etcd is unreachable for *": NOTHING,
    "a client leaves or stops reading": NOTHING,
}


def row_of(fault: Fault) -> str:
    """Return the pattern of `LIMITS` that matches. Raises: LookupError, for a fault without a limit."""
    kind = kind_of(fault)
    for pattern in LIMITS:
        if fnmatchcase(kind, pattern):
            return pattern
    raise LookupError(f"no limit for: {kind}")


def limit_of(schedule: Sequence[Fault]) -> Limit:
    """Return the sum of the limits of all faults. Messages lost in a row are repeated one by one, so each counts."""
    limits = [LIMITS[row_of(fault)] for fault in schedule]
    limits += [LIMITS[row_of(f)] for f in schedule if f.do is Do.DROP for _ in range(1, min(f.count, IN_A_ROW))]
    return Limit(*map(sum, zip(NOTHING, *limits, strict=True)))


def usual_s(setup: Setup) -> float:
    """Return the longest silence of a run without faults."""
    return USUAL_S + USUAL_STEPS * max(setup.decode_step_s, setup.prefill_step_s)


def beyond(seen: Seen, limit: Limit, setup: Setup) -> Iterator[str]:
    """Yield an error for each limit that was exceeded."""
    silence_s = usual_s(setup) + limit.silence_s
    if seen.silence_s > silence_s:
        yield f"a client got nothing for {seen.silence_s:.2f} s, the limit is {silence_s:.2f} s"
    if seen.failed > limit.failed:
        yield f"{seen.failed} answers failed, the limit is {limit.failed}"
    if seen.moves > limit.moves:
        yield f"{seen.moves} requests moved from decode instances that were well, the limit is {limit.moves}"
