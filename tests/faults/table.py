"""python -m tests.faults.table: the effects of each kind of fault on clients, with their limits, as in docs/outages.md."""

import argparse
import logging
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import Pool
from pathlib import Path
from typing import Any, Final

from tests.faults.limits import LIMITS, Limit, Seen, row_of, usual_s
from tests.faults.mesh_run import run_faults
from tests.faults.outages import OUTAGES
from tests.faults.schedules import Schedule, conditions, of_messages, of_states, of_writes
from tests.faults.setup import PLAIN, Setup

HOME: Final = Path(tempfile.gettempdir()) / "kvmesh-faults"  # the mock's model, written at the first run
HEAD: Final = (
    "| {} | longest silence, s: limit | worst | failed answers: limit | worst | moves from healthy decodes: limit | worst |\n"
    "|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True, slots=True)
class Run:
    """One run for one row of a table."""

    row: str
    seed: int
    schedule: Schedule
    changes: dict[str, Any]

    def see(self) -> tuple[str, Seen]:
        return self.row, run_faults(HOME, self.seed, self.schedule, **self.changes).seen


def of_outages(seeds: int) -> Iterator[Run]:
    for outage in OUTAGES:
        for seed in range(1, seeds + 1):
            yield Run(outage.name, seed, outage.schedule, {**outage.load, "limit": outage.limit})


def of_faults(seeds: int) -> Iterator[Run]:
    for schedule in (*of_messages(), *of_writes(), *of_states()):
        if len(schedule) == 1:
            seed, changes = conditions(schedule)
            for i in range(seeds):
                yield Run(row_of(schedule[0]), seed + i, schedule, changes)


def worst(runs: Sequence[Run], processes: int) -> dict[str, Seen]:
    """Return the worst of all runs of each row."""
    found: dict[str, Seen] = {}
    with Pool(processes) as pool:
        for row, seen in pool.imap_unordered(Run.see, runs):
            found[row] = Seen(*map(max, seen, found.get(row, seen)))
    return found


def row(name: str, limit: Limit, setup: Setup, seen: Seen | None) -> str:
    """Return a line of a table, or without `seen` a pattern that finds it. The limit of silence includes the usual silence."""
    cells = [name]
    limits = (f"{usual_s(setup) + limit.silence_s:.1f}", f"{limit.failed}", f"{limit.moves}")
    worst = ("*",) * 3 if seen is None else (f"{seen.silence_s:.1f}", f"{seen.failed}", f"{seen.moves}")
    for limited, was in zip(limits, worst, strict=True):
        cells += [limited, was]
    return f"| {' | '.join(cells)} |"


def shown(pattern: str) -> str:
    """Return a pattern of `LIMITS` in plain words."""
    return pattern.replace("* arrives", "a message arrives").replace(" *", " …").replace("hangs*", "hangs …")


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.table", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each outage, and of each single fault")
    parser.add_argument("--outages", action="store_true", help="the table of outages alone, which takes a minute")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    seen = worst([*of_outages(options.seeds)], options.processes)
    print(HEAD.format("outage"))
    for outage in OUTAGES:
        print(row(outage.name, outage.limit, outage.setup, seen[outage.name]))
    if options.outages:
        return
    seen = worst([*of_faults(options.seeds)], options.processes)
    print(f"\n{HEAD.format('fault')}")
    for pattern, limit in LIMITS.items():
        if pattern in seen:
            print(row(shown(pattern), limit, PLAIN, seen[pattern]))


if __name__ == "__main__":
    main()
