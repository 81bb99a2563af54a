"""Outages of servers and instances, with the most that clients may see of each."""

from dataclasses import dataclass, field
from typing import Any, Final

from tests.faults.faults import LAST_FRAME, Do, Fault
from tests.faults.limits import Limit
from tests.faults.schedules import ANSWER
from tests.faults.setup import PLAIN, Setup

GENERATE_ACCEPTED, PREFILL_ACCEPTED, ROOM_OK = ANSWER
# Streams of half a minute or more, short answers beside them, and pages for all.
LONG: Final[dict[str, Any]] = {
    "setup": Setup(decode_step_s=0.3, pool_tokens=4096),
    "max_tokens": (2, 2, 2, 100, 200),
    "life_s": 150.0,
}
SHORT: Final[dict[str, Any]] = {"num_clients": 40, "over_s": 2.0}
ONE_DECODE: Final = {"frontend": 1, "decode": 1, "prefill": 2, "bootstrap": 2}
TWO_FRONTENDS: Final = {"frontend": 2, "decode": 2, "prefill": 2, "bootstrap": 2}


@dataclass(frozen=True, slots=True)
class Outage:
    name: str
    schedule: list[Fault]
    limit: Limit
    load: dict[str, Any] = field(default_factory=dict)  # arguments of `check`

    @property
    def setup(self) -> Setup:
        return self.load.get("setup", PLAIN)

    def __str__(self) -> str:
        return self.name


def _etcd(seconds: float) -> Outage:
    load = {**LONG, "num_clients": max(20, int(seconds / 3)), "over_s": seconds + 5.0}
    return Outage(
        f"etcd is unreachable for {seconds:g} s", [Fault(Do.ETCD_AWAY, "time 2", amount=seconds)], Limit(0.0), load
    )


def _cut_off(role: str) -> Outage:
    fault = Fault(Do.CUT_OFF, "time 2", amount=30.0, role=role)
    load = {**LONG, "num_clients": 20, "over_s": 35.0}
    return Outage(f"a {role} cannot reach etcd for 30 s", [fault], Limit(0.0), load)


def _lost(name: str, kind: str, count: int = 1) -> Outage:
    return Outage(f"{name} is lost", [Fault(Do.DROP, f"message {kind}", 3, count)], Limit(2.0 * count), SHORT)


OUTAGES: Final = [
    _etcd(8.0),
    _etcd(30.0),
    _etcd(60.0),
    _etcd(600.0),
    *(_cut_off(role) for role in ("frontend", "decode", "prefill", "bootstrap")),
    # half of the messages sent meanwhile are lost, the rest arrive late
    Outage("NATS is unreachable for 0.5 s", [Fault(Do.NATS_AWAY, "time 1", amount=0.5)], Limit(0.5 + 2.0), SHORT),
    Outage("NATS is unreachable for 5 s", [Fault(Do.NATS_AWAY, "time 1", amount=5.0)], Limit(5.0 + 2.0), SHORT),
    Outage(
        "NATS is unreachable for 5 s during long streams",
        [Fault(Do.NATS_AWAY, "time 3", amount=5.0)],
        Limit(5.0 + 2.0),
        LONG,
    ),
    _lost("a frame of tokens", "frame"),
    _lost("a stream's last frame", LAST_FRAME),
    _lost("the last frame of four streams in a row", LAST_FRAME, 4),
    _lost("decode's answer to a request", GENERATE_ACCEPTED),
    _lost("prefill's answer to a request", PREFILL_ACCEPTED),
    _lost("bootstrap's answer to an offer of pages", ROOM_OK),
    Outage(
        "a bootstrap hangs, but renews its lease",
        [Fault(Do.HANG, "time 0.5", amount=20.0, role="bootstrap")],
        Limit(0.3),
        {"num_clients": 40, "over_s": 10.0},
    ),
    Outage(
        "a decode hangs, but renews its lease",
        [Fault(Do.HANG, "time 0.5", amount=20.0, role="decode")],
        Limit(3.0),
        {"num_clients": 40, "over_s": 10.0},
    ),
    Outage(
        "all steps of a decode fail",
        [Fault(Do.STEPS_FAIL, "time 0.5", role="decode")],
        Limit(2.5),
        {"num_clients": 100, "over_s": 10.0},
    ),
    Outage(
        "all steps of a prefill fail",
        [Fault(Do.STEPS_FAIL, "time 0.5", role="prefill")],
        Limit(2.5),
        {"num_clients": 100, "over_s": 10.0},
    ),
    Outage(
        "the only decode is missing for 4 s",
        [Fault(Do.KILL, "time 1", role="decode")],
        Limit(6.0),
        {"num_clients": 40, "over_s": 8.0, "counts": ONE_DECODE, "restart_s": 4.0},
    ),
    Outage(
        "a frontend is killed with open streams",
        [Fault(Do.KILL, "time 3", role="frontend")],
        Limit(0.0),
        {**LONG, "num_clients": 10, "counts": TWO_FRONTENDS},
    ),
]
