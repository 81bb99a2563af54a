"""Load test of an OpenAI endpoint: throughput, time to first token, time per output token.

    python -m bench.serve                                                    # random words, 1 client, then 8
    python -m bench.serve --request-rate 4 --num-prompts 200 --workload sharegpt-like     # --max-concurrency 16
    python -m bench.serve --workload shared-prefix --groups 8 --prompts-per-group 16 --prefix-len 1024
    python -m bench.serve --workload trace-replay --trace conversation_trace.jsonl --trace-scale 0.05

With --concurrency each client has one request at a time; with --request-rate requests arrive at random. A trace has its
own times unless one of these options is set. Prompts are random English words, different in every run. The endpoint must
accept `ignore_eos`.
"""

import asyncio
import itertools
import json
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import httpx
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.load.client import Run, body_of, closed_loop, open_loop
from bench.load.plot import pyplot, save_plot
from bench.load.replay import trace_requests
from bench.load.report import figures, more_figures, table
from bench.load.workloads import (
    SHAREGPT_INPUT,
    SHAREGPT_OUTPUT,
    PlannedRequest,
    Workload,
    poisson_times_s,
    random_requests,
    shared_prefix_requests,
    sharegpt_requests,
)
from components.local_mesh import local_mesh
from components.settings import MeshSettings

CONNECT_S: Final = 10.0
PROGRESS_S: Final = 10.0
DEFAULT_URL: Final = "http://127.0.0.1:8000"
STATE_DIR: Final = Path(MeshSettings.model_fields["state_dir"].default)
WARM_UP_TOKENS: Final = 8


def find_model(url: str, model: str | None) -> str:
    """Return `model`, or the endpoint's first model. Exit if the endpoint does not answer."""
    try:
        answer = httpx.get(f"{url.rstrip('/')}/v1/models", timeout=CONNECT_S)
        if model is not None:
            return model
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except (httpx.TransportError, httpx.InvalidURL) as exc:
        sys.exit(f"no server at {url} ({exc or type(exc).__name__}): start one or set --url")
    except (httpx.HTTPStatusError, ValueError, LookupError, TypeError) as exc:
        sys.exit(f"{url}/v1/models lists no model ({type(exc).__name__}): set --model")


@dataclass(frozen=True, slots=True)
class Shape:
    workload: Workload
    input_len: int
    output_len: int
    range_ratio: float
    max_len: int
    groups: int
    prompts_per_group: int
    prefix_len: int
    trace: Path | None
    trace_scale: float
    trace_speed: float
    seed: int | None

    def planned_requests(self, count: int | None) -> list[PlannedRequest]:
        """Return `count` requests, unless the workload has its own number. Exit if the trace cannot be read."""
        draw = random.Random(self.seed)
        match self.workload:
            case Workload.RANDOM:
                return random_requests(draw, count or 0, self.input_len, self.output_len, self.range_ratio)
            case Workload.SHAREGPT:
                return sharegpt_requests(draw, count or 0, self.input_len, self.output_len, self.max_len)
            case Workload.SHARED_PREFIX:
                sizes = (self.prefix_len, self.input_len, self.output_len)
                return shared_prefix_requests(draw, self.groups, self.prompts_per_group, *sizes)
        assert self.trace is not None
        try:
            return trace_requests(self.trace, count, self.trace_scale, self.trace_speed, draw.getrandbits(32))
        except (OSError, ValueError) as exc:
            sys.exit(str(exc))

    def facts(self) -> dict[str, Any]:
        sizes = {"input_len": self.input_len, "output_len": self.output_len}
        match self.workload:
            case Workload.RANDOM:
                return sizes | {"range_ratio": self.range_ratio}
            case Workload.SHAREGPT:
                return {"workload": self.workload, **sizes}
            case Workload.SHARED_PREFIX:
                groups = {"groups": self.groups, "prompts_per_group": self.prompts_per_group}
                return {"workload": self.workload, **sizes, **groups, "prefix_len": self.prefix_len}
        return {
            "workload": self.workload,
            "trace": str(self.trace),
            "trace_scale": self.trace_scale,
            "trace_speed": self.trace_speed,
        }


@dataclass(frozen=True, slots=True)
class Level:
    """A level of load: closed loop, Poisson arrivals, or a trace's times."""

    concurrency: int | None = None
    request_rate: float | None = None
    max_concurrency: int | None = None  # of a rate or a trace

    def __str__(self) -> str:
        if self.concurrency is not None:
            return f"{self.concurrency} clients"
        rate = "at the trace's times" if self.request_rate is None else f"{self.request_rate:g} requests/s"
        return rate if self.max_concurrency is None else f"{rate}, at most {self.max_concurrency} at once"

    def facts(self) -> dict[str, Any]:
        return {
            name: value
            for name in ("concurrency", "request_rate", "max_concurrency")
            if (value := getattr(self, name)) is not None
        }

    async def run(
        self, url: str, model: str, planned: Sequence[PlannedRequest], done: Callable[[], object], run: Run
    ) -> Run:
        bodies = [body_of(request, model) for request in planned]
        if self.concurrency is not None:
            return await closed_loop(url, bodies, self.concurrency, None, done, run)
        if self.request_rate is not None:
            times_s: Iterator[float] = poisson_times_s(random.Random(), self.request_rate)
        else:
            times_s = (request.at_s or 0.0 for request in planned)
        timed = sorted(zip(itertools.islice(times_s, len(bodies)), bodies, strict=True), key=lambda pair: pair[0])
        return await open_loop(url, timed, done, run, self.max_concurrency)


@contextmanager
def progress_bar(title: str, total: int) -> Iterator[Callable[[], object]]:
    """Show a progress bar, or without a terminal a line from time to time."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _ProgressLines(title, total)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(title, total=total)
        yield lambda: progress.advance(task)


class _ProgressLines:
    def __init__(self, title: str, total: int) -> None:
        self._title = title
        self._total = total
        self._done = 0
        self._began_s = self._printed_s = time.monotonic()

    def __call__(self) -> None:
        self._done += 1
        now_s = time.monotonic()
        if now_s - self._printed_s >= PROGRESS_S:
            self._printed_s = now_s
            line = f"{self._title}: {self._done} of {self._total} requests after {now_s - self._began_s:.0f} s"
            print(line, file=sys.stderr, flush=True)


def find_url(url: str | None, state_dir: Path) -> str:
    found = local_mesh(state_dir.expanduser()).get("http") or [DEFAULT_URL]
    return str(url or found[0])


def warm_up(url: str, model: str, requests: int, input_len: int) -> None:
    """Send some requests. Exit with the endpoint's error if they fail."""
    if requests == 0:
        return
    planned = random_requests(random.Random(), requests, input_len, WARM_UP_TOKENS, 1.0)
    run = asyncio.run(closed_loop(url, [body_of(request, model) for request in planned], 1))
    if run.failed:
        sys.exit(f"{run.failed} of {requests} requests to warm up {url} failed: {next(iter(run.reasons))}")


def main(
    url: Annotated[
        str | None, typer.Option(help=f"endpoint (default: the local mesh of --state-dir, else {DEFAULT_URL})")
    ] = None,
    model: Annotated[str | None, typer.Option(help="model (default: the first that the endpoint lists)")] = None,
    *,
    workload: Annotated[Workload, typer.Option(help="kind of load")] = Workload.RANDOM,
    concurrency: Annotated[
        list[int] | None, typer.Option(help="clients at once; may be given several times (default: 1, then 8)", min=1)
    ] = None,
    state_dir: Annotated[Path, typer.Option(help="state directory of a mesh on this machine")] = STATE_DIR,
    request_rate: Annotated[
        float | None, typer.Option(help="requests per second with Poisson arrivals, instead of --concurrency", min=1e-6)
    ] = None,
    max_concurrency: Annotated[
        int | None, typer.Option(help="with --request-rate or a trace: maximum number of requests in flight", min=1)
    ] = None,
    requests: Annotated[int, typer.Option(help="requests per client, with --concurrency", min=1)] = 6,
    num_prompts: Annotated[
        int | None, typer.Option(help="total number of requests, instead of --requests", min=1)
    ] = None,
    input_len: Annotated[
        int | None, typer.Option(help="tokens of a prompt; the mean if lengths vary (default: 256)")
    ] = None,
    output_len: Annotated[
        int | None, typer.Option(help="tokens of an answer; the mean if lengths vary (default: 64)")
    ] = None,
    range_ratio: Annotated[
        float, typer.Option(help="random: ratio of the shortest to the longest length", min=0.0, max=1.0)
    ] = 1.0,
    max_len: Annotated[
        int, typer.Option(help="sharegpt-like: maximum tokens of prompt and answer together", min=2)
    ] = 2048,
    groups: Annotated[int, typer.Option(help="shared-prefix: number of system prompts", min=1)] = 4,
    prompts_per_group: Annotated[int, typer.Option(help="shared-prefix: questions per system prompt", min=1)] = 8,
    prefix_len: Annotated[int, typer.Option(help="shared-prefix: tokens of a system prompt", min=1)] = 512,
    trace: Annotated[Path | None, typer.Option(help="trace-replay: a file in Mooncake's format")] = None,
    trace_scale: Annotated[float, typer.Option(help="trace-replay: factor of all lengths", min=1e-6)] = 1.0,
    trace_speed: Annotated[float, typer.Option(help="trace-replay: speed of arrivals", min=1e-6)] = 1.0,
    seed: Annotated[
        int | None, typer.Option(help="seed; the same seed makes the same prompts, which may be cached")
    ] = None,
    warmup: Annotated[int, typer.Option(help="requests before the first measured one", min=0)] = 1,
    label: Annotated[str, typer.Option(help="label in every line")] = "kvmesh",
    json_file: Annotated[
        Path | None, typer.Option("--json", help="append a line per run to this file; -: print them")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="picture of the distributions, PNG or SVG")] = None,
) -> None:
    if concurrency and request_rate is not None:
        sys.exit("--concurrency and --request-rate exclude each other; --max-concurrency limits a rate")
    timed = request_rate is not None or workload is Workload.TRACE
    if max_concurrency is not None and (concurrency or not timed):
        sys.exit("--max-concurrency limits --request-rate or a trace; without these, set --concurrency")
    if (workload is Workload.TRACE) != (trace is not None):
        sys.exit("--workload trace-replay requires --trace FILE, and the reverse")
    for path in (json_file, plot):  # check before the load, not after it
        if path is not None and not path.parent.is_dir():
            sys.exit(f"{path} cannot be written: the directory {path.parent} does not exist")
    if plot is not None:
        pyplot()
    like_sharegpt = workload is Workload.SHAREGPT
    shape = Shape(
        workload,
        input_len or (SHAREGPT_INPUT if like_sharegpt else 256),
        output_len or (SHAREGPT_OUTPUT if like_sharegpt else 64),
        range_ratio,
        max_len,
        groups,
        prompts_per_group,
        prefix_len,
        trace,
        trace_scale,
        trace_speed,
        seed,
    )
    levels = [Level(clients) for clients in concurrency or ()]
    if not levels:
        levels = [Level(None, request_rate, max_concurrency)] if timed else [Level(1), Level(8)]
    url = find_url(url, state_dir)
    name = find_model(url, model)
    warm_up(url, name, warmup, min(shape.input_len, max_len // 2))
    runs = []
    interrupted = threading.Event()
    for level in levels:
        count = num_prompts or (None if workload is Workload.TRACE else requests * (level.concurrency or 10))
        run = measure_level(url, name, level, shape.planned_requests(count), interrupted)
        runs.append((str(level), run))
        print_run(
            run, f"{label}: {name}, {workload}, {level}", json_file, label=label, **level.facts(), **shape.facts()
        )
        if interrupted.is_set():
            break
    if plot is not None:
        save_plot(runs, plot)
    if interrupted.is_set():
        sys.exit(128 + signal.SIGINT)
    if any(not run.ttft_s for _, run in runs):
        sys.exit(1)


def measure_level(
    url: str, model: str, level: Level, planned: Sequence[PlannedRequest], interrupted: threading.Event
) -> Run:
    run = Run()

    async def until_signal() -> None:
        loop = asyncio.get_running_loop()
        sending = asyncio.ensure_future(level.run(url, model, planned, done, run))

        def stop() -> None:
            interrupted.set()
            sending.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop)
        await asyncio.wait((sending,))
        if not sending.cancelled():
            sending.result()

    with progress_bar(str(level), len(planned)) as done:
        asyncio.run(until_signal())
    return run


def print_run(run: Run, title: str, json_file: Path | None, **facts: Any) -> None:
    line = json.dumps(figures(run, **facts, **more_figures(run)))
    if json_file == Path("-"):
        print(line, flush=True)
        return
    print(table(run, title), flush=True)
    if json_file is not None:
        with json_file.open("a") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    typer.run(main)
