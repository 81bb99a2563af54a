"""Incidents of workers and their syntax."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

Role = Literal["prefill", "decode"]
Kind = Literal["crash", "slow", "lie", "add", "drain"]

ROLES: Final[dict[str, Role]] = {"prefill": "prefill", "decode": "decode"}
FACTORED: Final[dict[str, Kind]] = {"slow": "slow", "lie": "lie"}
PLAIN: Final[dict[str, Kind]] = {"crash": "crash", "drain": "drain"}
SYNTAX: Final = (
    "`crash ROLE WORKER AT`, `drain ROLE WORKER AT`, `slow ROLE WORKER AT FACTOR` (of each step), `lie ROLE WORKER AT FACTOR` "
    "(of the load in its heartbeats), `add ROLE COUNT AT`, `flap ROLE WORKER AT UP DOWN TIMES`; seconds, workers from 0"
)


@dataclass(frozen=True, slots=True)
class Incident:
    """An event at `at_s` for a worker of a role, numbered by order of arrival."""

    at_s: float
    kind: Kind
    role: Role = "decode"
    worker: int = 0
    factor: float = 1.0  # for `slow` of each step's time, for `lie` of the reported load


def flapping(
    role: Role, worker: int, first_s: float, up_s: float, down_s: float, times: int, workers: int
) -> list[Incident]:
    """Return crashes, `times` times, each down for `down_s`, then up for `up_s` with a new id.

    `workers`: number of the role's workers before the first return; no others may join.
    """
    incidents = []
    for turn in range(times):
        at_s = first_s + turn * (up_s + down_s)
        incidents.append(Incident(at_s, "crash", role, worker if turn == 0 else workers + turn - 1))
        incidents.append(Incident(at_s + down_s, "add", role))
    return incidents


def check(incidents: Sequence[Incident], at_start: Mapping[Role, int]) -> None:
    """Check that all workers exist by then; `at_start`: their numbers at the start. Raises: ValueError."""
    there = dict(at_start)
    for incident in sorted(incidents, key=lambda i: i.at_s):
        if incident.kind == "add":
            there[incident.role] += 1
        elif incident.worker >= there[incident.role]:
            raise ValueError(
                f"{incident.kind} {incident.role} {incident.worker} at {incident.at_s:g} s: there are "
                f"{there[incident.role]} by then, counted from 0"
            )


def parse(text: str, at_start: Mapping[Role, int]) -> list[Incident]:
    """Parse an incident. `at_start`: number of workers of each role. Raises: ValueError."""
    words = text.split()
    try:
        kind, number, times = words[0], int(words[2]), [float(word) for word in words[3:]]
        role = ROLES[words[1]]
        if number < 0 or min(times, default=0.0) < 0:
            raise ValueError("negative")
        if kind == "flap":
            at_s, up_s, down_s, count = times
            return flapping(role, number, at_s, up_s, down_s, int(count), at_start[role])
        if kind == "add":
            (at_s,) = times
            return [Incident(at_s, "add", role) for _ in range(number)]
        at_s, *factor = times
        if kind in FACTORED and len(factor) == 1:
            return [Incident(at_s, FACTORED[kind], role, number, factor[0])]
        if factor:
            raise ValueError(f"{len(times)} numbers")
        return [Incident(at_s, PLAIN[kind], role, number)]
    except (ValueError, LookupError) as exc:
        raise ValueError(f"{text!r} is not one of {SYNTAX}: {exc}") from exc
