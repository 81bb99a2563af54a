r"""Compare routing policies on a simulated fleet in virtual time. Prints one line of figures for each policy.

    python -m bench.simulate --trace conversation_trace.jsonl --prefill 3 --decode 2 --speedup 10 --plot routing.png
    python -m bench.simulate --workload shared-prefix --decode 1000 --requests 1000000 --rate 2000 --policy kv_aware
    python -m bench.simulate --incident "crash decode 0 60" --incident "flap prefill 1 30 10 5 8"
    python -m bench.simulate --trace conversation_trace.jsonl --swing 0.7 --policy kv_aware --speedup 10 \
        --prefill 2 --decode 1 --fixed 3/2 --fixed 6/3 --planner 1..6/1..3

Policies, load book, breakers and block index are those of `components/routing`. A worker is the engine's scheduler
with the mock engine's cost model; `--fit` fits its constants to lines of `bench.engine`. A worker on several devices is
faster by `--device-speed`, or as measured by `--prefill-fit`. Approximations:

- Steps between two events are computed in closed form; their gaps count as their mean.
- A request has pages for its prompt and whole answer from the start, so none is preempted. A page has 512 tokens,
  like a block of the trace.
- Answers and unfinished prompts are not in the prefix cache.
- Messages take no time, except KV, heartbeats and KV events. Each prefill worker has its own link, and chunks are
  sent while the next is computed.
- Each decode worker has its own router; above 16, several share one (`--prefill-routers`). All share one block
  index.
- Decode computes a prompt if little of it is uncached, or if no prefill worker is alive, but not because of long queues.
- A planned worker serves after --start-s. It is counted as soon as it is requested.
- Senders detect a crash at once, all others after 2 s. No worker hangs, and retries have no back-off.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from bench.load.replay import read_trace
from bench.simulate import incidents
from bench.simulate.draw import save_plot
from bench.simulate.fit import fit_file
from bench.simulate.fleet import Fleet
from bench.simulate.measured import Measured, Slo
from bench.simulate.planned import Plan, PlannedFleet
from bench.simulate.routers import Delays, MakePolicy
from bench.simulate.setup import Link, Setup
from bench.simulate.traffic import Lengths, Request, conversations, shared_prefixes, swinging, trace
from bench.simulate.worker import Engine
from components.messaging.fan_out import heartbeat_rest_s, kv_events_rest_s, queries_per_s
from components.messaging.liveness import EVERY_S, silent_after_s
from components.planning.needs import Targets
from components.planning.planner import Bounds
from components.routing.policies import POLICIES, WorkerRole, parse_policy
from engine.config import MockConfig

MAX_ROUTERS: Final = 16  # limit, because each router receives every heartbeat
MAX_SKEW: Final = 50.0  # weights of a million prompts are numbers
PICTURES: Final = (".png", ".svg")
COLUMNS: Final = (
    ("TTFT p50", "ttft_ms_p50"),
    ("p90", "ttft_ms_p90"),
    ("p99", "ttft_ms_p99"),
    ("ITL p50", "itl_ms_p50"),
    ("p99", "itl_ms_p99"),
    ("cached", "cache_hit"),
    ("spread", "spread"),
    ("SLO", "slo"),
    ("goodput/w", "goodput_per_worker"),
    ("worker s", "worker_s"),
    ("CPU s", "cpu_s"),
)


class Workload(StrEnum):
    SHARED_PREFIX = "shared-prefix"
    CONVERSATIONS = "conversations"


class Follow(StrEnum):
    ALL = "all"  # follow all workers
    ASK = "ask"  # query candidates for each prompt


def policy_maker(names: str, role: WorkerRole) -> MakePolicy:
    """Parse a policy for both roles, or `PREFILL/DECODE`. Raises: typer.BadParameter."""
    prefill, _, decode = names.partition("/")
    name = prefill if role == "prefill" else decode or prefill
    try:
        spec = parse_policy(name)
    except ValueError as exc:
        raise typer.BadParameter(str(exc)) from exc
    return lambda rng: spec.make(role, rng)


def _check_finite(options: Mapping[str, object]) -> None:
    """Check that all numbers are finite, because typer accepts NaN and infinity. Raises: typer.BadParameter."""
    for name, value in options.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise typer.BadParameter(f"--{name.replace('_', '-')} {value} is not a finite number")


def _check_files(trace_file: Path | None, requests: int | None, plot: Path | None, json_file: Path | None) -> None:
    """Check the options before the runs. Raises: typer.BadParameter."""
    if plot is not None and plot.suffix.lower() not in PICTURES:
        raise typer.BadParameter(f"--plot {plot} does not end in {' or '.join(PICTURES)}")
    for option, file in (("--plot", plot), ("--json", json_file)):
        if file is not None and not file.parent.is_dir():
            raise typer.BadParameter(f"{option} {file}: the directory {file.parent} does not exist")
    if trace_file is not None:
        try:
            for _ in read_trace(trace_file, requests):
                pass
        except ValueError as exc:
            raise typer.BadParameter(f"--trace {exc}") from exc
        except OSError as exc:
            raise typer.BadParameter(f"--trace {trace_file}: {exc.strerror}") from exc


def _fitted(option: str, path: Path, label: str | None) -> MockConfig:
    """Fit the cost model to a file. Raises: typer.BadParameter."""
    try:
        return fit_file(path, label).cost
    except ValueError as exc:
        raise typer.BadParameter(f"{option} {path}: {exc}") from exc
    except OSError as exc:
        raise typer.BadParameter(f"{option} {path}: {exc.strerror}") from exc


def _row(label: str, cells: list[str]) -> str:
    return f"{label:<22}" + "".join(f"{cell:>11}" for cell in cells)


def _table_row(label: str, figures: dict[str, Any]) -> str:
    spread = figures.get("prefill_spread", figures.get("decode_spread", 0.0))
    return _row(label, [f"{ {**figures, 'spread': spread}[key]:g}" for _, key in COLUMNS])


def _sized(setup: Setup, text: str) -> Setup:
    """Return `setup` with `PREFILL/DECODE` workers. Raises: typer.BadParameter."""
    prefill, _, decode = text.partition("/")
    if not (prefill.isdecimal() and decode.isdecimal()):
        raise typer.BadParameter(f"--fixed {text} is not PREFILL/DECODE")
    return replace(setup, prefill=int(prefill), decode=int(decode))


def with_queries(setup: Setup) -> Setup:
    """Return `setup` in which decode workers query candidates, with a large fleet's heartbeat intervals."""
    to_frontends = setup.decode * setup.decode_routers
    heartbeat_s = max(heartbeat_rest_s(setup.decode, to_frontends), EVERY_S)
    delays = Delays(
        heartbeat_s,
        setup.delays.event_s + kv_events_rest_s(to_frontends),
        silent_after_s(heartbeat_s),
        queries_per_s(setup.decode),
    )
    return replace(setup, delays=delays, prefill_routers=max(setup.decode, 1), queries=True)


def speeds_of(text: str) -> dict[int, float]:
    """Parse factors by number of devices, such as `2=1.7,4=2.9`. Raises: typer.BadParameter."""
    speeds = {1: 1.0}
    for part in filter(None, text.split(",")):
        found = re.fullmatch(r"\s*(\d+)\s*=\s*(\d+(?:\.\d+)?)\s*", part)
        if found is None or not int(found[1]) or not float(found[2]):
            raise typer.BadParameter(f"--device-speed {text} is not DEVICES=FACTOR,…")
        speeds[int(found[1])] = float(found[2])
    return speeds


def engine_on(devices: int, engine: Engine, speeds: Mapping[int, float], measured: MockConfig | None) -> Engine:
    """Return `engine` on this many devices, with the speed of `measured` or else `speeds`. Raises: typer.BadParameter."""
    cost = engine.cost
    if measured is not None:
        cost = replace(measured, speedup=cost.speedup)
    elif devices not in speeds:
        raise typer.BadParameter(
            f"the speed of {devices} devices is unknown: set --device-speed {devices}=FACTOR, or a file to fit"
        )
    else:
        cost = replace(cost, speedup=cost.speedup * speeds[devices])
    return replace(engine, cost=cost, devices=devices)


def plan_of(text: str, targets: Targets, start_s: float, most_devices: int | None = None) -> Plan:
    """Parse bounds for prefill and decode workers, such as `1..4/1..2`. Raises: typer.BadParameter."""
    found = re.fullmatch(r"(\d+)\.\.(\d+)/(\d+)\.\.(\d+)", text)
    bounds = [int(number) for number in found.groups()] if found else []
    if not bounds or not (1 <= bounds[0] <= bounds[1] and 1 <= bounds[2] <= bounds[3]):
        raise typer.BadParameter(f"--planner {text} is not LEAST..MOST/LEAST..MOST with at least 1 of each role")
    return Plan(Bounds(*bounds[:2]), Bounds(*bounds[2:]), targets, start_s=start_s, most_devices=most_devices)


def _parse_incidents(texts: Sequence[str], workers: Mapping[incidents.Role, int]) -> list[incidents.Incident]:
    """Parse incidents for a fleet that begins with `workers`. Raises: typer.BadParameter."""
    try:
        parsed = [incident for text in texts for incident in incidents.parse(text, workers)]
        incidents.check(parsed, workers)
    except ValueError as exc:
        raise typer.BadParameter(str(exc)) from exc
    return parsed


@dataclass(frozen=True, slots=True)
class Case:
    """A fleet on which each policy runs."""

    label: str  # in the table, after the policy's name
    setup: Setup
    plan: Plan | None = None  # None: the fleet's size is fixed
    bounds: str = ""  # `plan` as given

    def run(
        self,
        traffic: Iterator[Request],
        decode_policy: MakePolicy,
        prefill_policy: MakePolicy,
        events: Sequence[incidents.Incident],
    ) -> tuple[Measured, dict[str, Any]]:
        """Simulate. Return the measurements, and facts for the JSON line."""
        fleet = Fleet(self.setup, traffic, decode_policy, prefill_policy, events)
        planned = PlannedFleet(fleet, self.plan) if self.plan else None
        measured = fleet.run()
        facts: dict[str, Any] = {"planned": self.bounds, "changes": len(planned.changes)} if planned else {}
        routers = fleet.prefills.routers
        facts["follow"] = Follow.ASK if self.setup.queries else Follow.ALL
        facts["asked"] = round(routers.num_asked / max(routers.num_chosen, 1), 2)
        return measured, facts


def main(
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME for both roles, or PREFILL/DECODE; NAME@OPTION=NUMBER,… as in settings; may be given several times (all)"
        ),
    ] = None,
    trace_file: Annotated[Path | None, typer.Option("--trace", help="a file in Mooncake's format")] = None,
    trace_speed: Annotated[float, typer.Option(help="speed of the trace's arrivals", min=1e-6)] = 1.0,
    workload: Annotated[
        Workload, typer.Option(help="synthetic workload, if there is no trace")
    ] = Workload.SHARED_PREFIX,
    requests: Annotated[
        int | None, typer.Option(help="total number of requests (default: 10,000, or the trace's)", min=1)
    ] = None,
    rate: Annotated[float, typer.Option(help="synthetic: requests per second", min=1e-6)] = 10.0,
    groups: Annotated[int, typer.Option(help="shared-prefix: number of system prompts", min=1)] = 64,
    skew: Annotated[
        float,
        typer.Option(help="shared-prefix: the k-th system prompt has a weight of 1/k^skew", min=0.0, max=MAX_SKEW),
    ] = 1.0,
    turns: Annotated[float, typer.Option(help="conversations: mean number of turns", min=1.0)] = 5.0,
    think_s: Annotated[float, typer.Option(help="conversations: mean seconds between turns", min=1e-6)] = 30.0,
    prefix_len: Annotated[int, typer.Option(help="synthetic: tokens of a system prompt", min=0)] = 2048,
    question_len: Annotated[int, typer.Option(help="synthetic: mean tokens of a question", min=1)] = 512,
    answer_len: Annotated[int, typer.Option(help="synthetic: mean tokens of an answer", min=1)] = 128,
    decode: Annotated[int, typer.Option(help="decode workers at the start", min=0)] = 4,
    prefill: Annotated[int, typer.Option(help="prefill workers; 0: decode workers compute prompts", min=0)] = 0,
    fit: Annotated[
        Path | None, typer.Option(help="file with lines of bench.engine to which the cost model is fitted")
    ] = None,
    fit_label: Annotated[str | None, typer.Option(help="only use lines with this label")] = None,
    speedup: Annotated[
        float, typer.Option(help="factor by which engines are faster than the cost model", min=1e-6)
    ] = 1.0,
    decode_devices: Annotated[int, typer.Option(help="devices per decode worker (--tp)", min=1)] = 1,
    prefill_devices: Annotated[int, typer.Option(help="devices per prefill worker (--tp)", min=1)] = 1,
    device_speed: Annotated[
        str,
        typer.Option(metavar="DEVICES=FACTOR,…", help="speed of a worker on several devices, relative to one device"),
    ] = "",
    prefill_fit: Annotated[
        Path | None,
        typer.Option(help="like --fit, for prefill workers, measured on --prefill-devices"),
    ] = None,
    pages: Annotated[int, typer.Option(help="pages of 512 tokens per worker", min=1)] = 1024,
    max_running: Annotated[int, typer.Option(help="limit of the engine", min=1)] = 64,
    max_step_tokens: Annotated[int, typer.Option(help="limit of the engine", min=2)] = 2048,
    link_gb_s: Annotated[float, typer.Option(help="speed of KV transfers from one prefill worker", min=1e-6)] = 12.0,
    kv_bytes: Annotated[float, typer.Option(help="bytes of KV per token", min=0.0)] = Link().bytes_per_token,
    news_ms: Annotated[float, typer.Option(help="delay of KV events", min=0.0)] = 5.0,
    heartbeat_s: Annotated[float, typer.Option(help="interval of a worker's heartbeats", min=1e-3)] = 0.5,
    frontends: Annotated[int, typer.Option(help="frontends, each with its own load book", min=1)] = 1,
    prefill_routers: Annotated[
        int | None, typer.Option(help="load books that choose prefill workers (default: --decode, at most 16)", min=1)
    ] = None,
    follow: Annotated[
        list[Follow] | None,
        typer.Option(
            help="prefill workers that a decode worker follows: all, or a share of them, whose rates then set "
            "--heartbeat-s and --news-ms; may be given several times (all)"
        ),
    ] = None,
    incident: Annotated[list[str] | None, typer.Option(help=f"may be given several times: {incidents.SYNTAX}")] = None,
    slo_ttft_ms: Annotated[float, typer.Option(help="TTFT limit for a good request")] = 2000.0,
    slo_tpot_ms: Annotated[float, typer.Option(help="TPOT limit for a good request")] = 100.0,
    swing: Annotated[
        float, typer.Option(help="relative amplitude by which the rate oscillates", min=0.0, max=0.99)
    ] = 0.0,
    period_s: Annotated[float, typer.Option(help="period of --swing in seconds", min=1.0)] = 1200.0,
    fixed: Annotated[
        list[str] | None,
        typer.Option(metavar="PREFILL/DECODE", help="another fixed fleet to compare; may be given several times"),
    ] = None,
    planner: Annotated[
        str | None,
        typer.Option(
            metavar="LEAST..MOST/LEAST..MOST",
            help="another fleet to compare, whose size the planner chooses; its targets are --slo-ttft-ms and "
            "--slo-tpot-ms",
        ),
    ] = None,
    planner_devices: Annotated[
        int | None, typer.Option(help="planner: maximum number of devices of all workers together", min=2)
    ] = None,
    start_s: Annotated[float, typer.Option(help="planner: time until a requested worker serves", min=0.0)] = 30.0,
    goal: Annotated[
        float, typer.Option(help="planner: share of requests that must meet the targets", min=0.5, max=0.999)
    ] = 0.9,
    seed: Annotated[int, typer.Option(help="seed; the same seed gives the same run")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="append a line per policy to this file")] = None,
    plot: Annotated[Path | None, typer.Option(help="file for a plot, PNG or SVG")] = None,
) -> None:
    _check_finite(locals())
    _check_files(trace_file, requests, plot, json_file)
    cost = _fitted("--fit", fit, fit_label) if fit else MockConfig()
    engine = Engine(replace(cost, speedup=speedup), pages, 512, max_running, max_step_tokens)
    speeds = speeds_of(device_speed)
    prefill_cost = _fitted("--prefill-fit", prefill_fit, fit_label) if prefill_fit else None
    setup = Setup(
        decode=decode,
        prefill=prefill,
        engine=engine_on(decode_devices, engine, speeds, None),
        prefill_engine=engine_on(prefill_devices, engine, speeds, prefill_cost),
        link=Link(kv_bytes, link_gb_s * 1e9),
        delays=Delays(heartbeat_s, news_ms / 1000),
        slo=Slo(slo_ttft_ms / 1000, slo_tpot_ms / 1000),
        decode_routers=frontends,
        prefill_routers=prefill_routers or max(1, min(decode, MAX_ROUTERS)),
        seed=seed,
    )
    parsed_incidents = _parse_incidents(incident or (), {"prefill": prefill, "decode": decode})
    lengths = Lengths(prefix_len, question_len, answer_len)

    def traffic() -> Iterator[Request]:
        return swinging(level_traffic(), swing, period_s) if swing else level_traffic()

    def level_traffic() -> Iterator[Request]:
        if trace_file is not None:
            return trace(trace_file, requests, trace_speed)
        if workload is Workload.CONVERSATIONS:
            return conversations(seed, requests or 10_000, rate, turns, think_s, lengths)
        return shared_prefixes(seed, requests or 10_000, rate, groups, skew, lengths)

    names = policy or list(POLICIES)
    makers = [(policy_maker(name, "decode"), policy_maker(name, "prefill")) for name in names]
    cases = [
        Case(f" {one.value}" if follow else "", setup if one is Follow.ALL else with_queries(setup))
        for one in follow or [Follow.ALL]
    ]
    cases += [Case(f" {text}", _sized(setup, text)) for text in fixed or ()]
    if planner is not None:
        targets = Targets(ttft_s=setup.slo.ttft_s, itl_s=setup.slo.tpot_s, goal=goal)
        cases.append(Case(" planned", setup, plan_of(planner, targets, start_s, planner_devices), planner))
    runs: list[tuple[str, Measured]] = []
    print(_row("ms", [head for head, _ in COLUMNS]))
    for name, policies in zip(names, makers, strict=True):
        for case in cases:
            run, facts = case.run(traffic(), *policies, parsed_incidents)
            runs.append((name + case.label, run))
            figures = run.figures(policy=name, prefill=case.setup.prefill, decode=case.setup.decode, **facts)
            print(_table_row(name + case.label, figures), flush=True)
            if json_file is not None:
                with json_file.open("a") as out:
                    out.write(json.dumps(figures) + "\n")
    if plot is not None:
        load = trace_file.name if trace_file else workload.value
        save_plot(
            runs,
            f"{load}: {prefill} prefill + {decode} decode workers" if prefill else f"{load}: {decode} workers",
            plot,
        )


if __name__ == "__main__":
    typer.run(main)
