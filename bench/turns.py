"""Compares two servers under the same load on one machine, by turns.

Each line has the number of cores that each process used, and `others`. The last lines are ratios of medians over
rounds, with targets.
"""

import asyncio
import json
import random
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, NamedTuple

import typer

from bench.load.client import Prepare, Run, body_of, closed_loop
from bench.load.report import figures
from bench.load.workloads import PlannedRequest, random_requests, words
from bench.processes import Server, cpu_s, free_port, machine_busy_s, mesh

COMPARED: Final = ("output_tok_s", "ttft_ms_p50", "tpot_ms_p50", "itl_ms_p99")
MESH_START_S: Final = 1200.0  # each worker may have to compile the model first
MEASURE_S: Final = 900.0  # time limit for one level of concurrency
WARM_UP_TOKENS: Final = 16
WAKE_S: Final = 1.0  # pause after SIGCONT, for the backlog of the stopped processes


# options of the comparisons
Rounds = Annotated[int, typer.Option(min=1, help="rounds; each measures both servers, in alternating order")]
Concurrency = Annotated[list[int], typer.Option(help="concurrent clients; may be given several times")]
Requests = Annotated[int, typer.Option(min=1, help="requests per client and round")]
InputLen = Annotated[int, typer.Option(help="tokens")]
OutputLen = Annotated[int, typer.Option(min=2, help="tokens")]
RangeRatio = Annotated[
    float, typer.Option(help="ratio of the shortest to the longest prompt and answer", min=0.0, max=1.0)
]
Model = Annotated[str, typer.Option(help="model, as for services.local")]


@dataclass(frozen=True, slots=True)
class Contestant:
    name: str
    url: str
    servers: Sequence[Server]
    facts: Mapping[str, Any]
    prepare: Prepare | None = None
    stopped_when_idle: bool = False

    @contextmanager
    def awake(self) -> Iterator[None]:
        if not self.stopped_when_idle:
            yield
            return
        self.resume()
        time.sleep(WAKE_S)
        try:
            yield
        finally:
            self.stop()

    def stop(self) -> None:
        for server in self.servers:
            server.signal_group(signal.SIGSTOP)

    def resume(self) -> None:
        for server in self.servers:
            server.signal_group(signal.SIGCONT)

    def cpu_s(self) -> float:
        return sum(cpu_s(pids) for server in self.servers for pids in server.processes().values())


@dataclass(frozen=True, slots=True)
class Work:
    rounds: int
    concurrency: Sequence[int]
    requests: int  # per client and round
    input_len: int  # tokens
    output_len: int  # tokens
    range_ratio: float = 1.0  # lengths are uniform from this share of the length to the length


class Target(NamedTuple):
    """A target for the ratio first / second, or for the first's own value."""

    figure: str
    bound: float
    clients: Sequence[int] | None = None  # None: any number
    own: bool = False  # the first's own value, in the figure's unit

    @property
    def is_rate(self) -> bool:
        return self.figure.endswith("_s")

    def met(self, value: float) -> bool:
        """Return whether `value`, a ratio or the first's own value, meets the target."""
        return value >= self.bound if self.is_rate else value <= self.bound


@contextmanager
def start_kvmesh(name: str, model: str, counts: Mapping[str, int], env: Mapping[str, str]) -> Iterator[Contestant]:
    """Start a mesh on this machine with the compiled model. `counts`: processes by role."""
    env = {"MESH_ENGINE__COMPILE": "wait", "MESH_ENGINE__COMPILE_TIMEOUT_S": str(MESH_START_S / 2), **env}
    port = free_port()
    with mesh(model, counts, env, port, MESH_START_S) as server:
        compiled = server.logged().count("the compiled model is now used")
        facts = {"counts": dict(counts), "compiled_workers": compiled, "env": env}
        yield Contestant(name, f"http://127.0.0.1:{port}", [server], facts)


def by_turns(
    pair: tuple[Contestant, Contestant], model: str, work: Work, targets: Sequence[Target], **facts: Any
) -> None:
    """Measure both in each round, in alternating order, and print a line per figure."""
    first, second = pair
    for contestant in pair:
        print(json.dumps({"label": contestant.name, "model": model, **facts, **contestant.facts}), flush=True)
    lines: list[dict[str, Any]] = []
    for number in range(work.rounds):
        for clients in work.concurrency:
            load = Load(model, clients, work, seed=f"{number} {clients}")
            turns = [(first, second), (second, first)]
            for contestant, other in turns if number % 2 == 0 else reversed(turns):
                line = {"label": contestant.name, **facts, "round": number, **load.facts()}
                lines.append(line | measure_one(contestant, other, load))
                print(json.dumps(lines[-1]), flush=True)
    for clients in work.concurrency:
        print(json.dumps({**facts, **compare(lines, (first.name, second.name), clients, targets)}), flush=True)


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of one round. Both servers get requests of the same lengths, with different words."""

    model: str
    clients: int
    work: Work
    seed: str

    def facts(self) -> dict[str, Any]:
        work = self.work
        sizes = {"concurrency": self.clients, "input_len": work.input_len, "output_len": work.output_len}
        return sizes if work.range_ratio == 1.0 else sizes | {"range_ratio": work.range_ratio}

    def planned_requests(self) -> list[PlannedRequest]:
        work = self.work
        sizes = (work.requests * self.clients, work.input_len, work.output_len, work.range_ratio)
        lengths, draw = random_requests(random.Random(self.seed), *sizes), random.Random()
        return [replace(request, prompt=words(draw, request.input_len)) for request in lengths]

    def warm_up(self) -> list[PlannedRequest]:
        return random_requests(random.Random(), self.clients, self.work.input_len, WARM_UP_TOKENS, 1.0)


def measure_one(contestant: Contestant, other: Contestant, load: Load) -> dict[str, Any]:
    """Return the figures of one load, after a warm-up of one request for each client.

    Exit if a request failed or had the wrong length, because such figures cannot be compared.
    """

    async def run_load(planned: Sequence[PlannedRequest]) -> Run:
        async with asyncio.timeout(MEASURE_S):
            return await closed_loop(
                contestant.url, [body_of(request, load.model) for request in planned], load.clients, contestant.prepare
            )

    planned = load.planned_requests()
    with contestant.awake():
        asyncio.run(run_load(load.warm_up()))
        before, busy_s, client_s = (contestant.cpu_s(), other.cpu_s()), machine_busy_s(), time.process_time()
        run = asyncio.run(run_load(planned))
        spent = {contestant.name: contestant.cpu_s() - before[0], other.name: other.cpu_s() - before[1]}
        spent["client"] = time.process_time() - client_s
        spent["others"] = max(0.0, machine_busy_s() - busy_s - sum(spent.values()))
    asked = sum(request.input_len for request in planned), sum(request.output_len for request in planned)
    if run.failed or (run.prompt_tokens, run.output_tokens) != asked:
        tokens = f"{run.prompt_tokens} tokens in, {run.output_tokens} out"
        sys.exit(f"{contestant.name}: of {len(planned)} requests {run.failed} failed; {tokens}, requested {asked}")
    return figures(run, cores={name: round(used_s / run.duration_s, 2) for name, used_s in spent.items()})


def compare(
    lines: Sequence[Mapping[str, Any]],
    names: tuple[str, str],
    clients: int,
    targets: Sequence[Target],
    compared: Sequence[str] = COMPARED,
) -> dict[str, Any]:
    """Return first / second of the medians over rounds, minimum and maximum of single rounds, and the target."""
    ratios: dict[str, Any] = {"compared": " / ".join(names), "concurrency": clients}
    for figure in compared:
        ours, theirs = (_over_rounds(lines, name, clients, figure) for name in names)
        each = [a / b for a, b in zip(ours, theirs, strict=True)]
        ratios[figure] = round(statistics.median(ours) / statistics.median(theirs), 3)
        ratios[f"{figure}_range"] = [round(min(each), 3), round(max(each), 3)]
    for target in targets:
        if target.clients is not None and clients not in target.clients:
            continue
        figure, value = target.figure, ratios.get(target.figure)
        if target.own:
            value = statistics.median(_over_rounds(lines, names[0], clients, figure))
            figure = f"{names[0]}_{figure}"
            ratios[figure] = round(value, 4)
        assert value is not None
        ratios[f"target_{figure}"] = target.bound
        ratios[f"met_{figure}"] = target.met(value)
    return ratios


def _over_rounds(lines: Sequence[Mapping[str, Any]], name: str, clients: int, figure: str) -> list[float]:
    return [line[figure] for line in lines if (line["label"], line["concurrency"]) == (name, clients)]
