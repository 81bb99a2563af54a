"""TTFT of short requests, alone and together with a flood of long ones. Prints one JSON line for each.

    python -m bench.long_prompts                          # 40 long requests per second together with 20 short ones
    python -m bench.long_prompts --long-rate 4 --frontend 2

It runs a mesh of zero-cost mock engines with SmolLM2's tokenizer. `health_ms` is the frontend's time to answer
`/health`, requested every 5 ms. Its maximum is the longest stall of the event loop, or of this client
(`client_stall_ms_max`).
"""

import asyncio
import json
import random
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import typer
import uvloop

from bench.closed_loop import Client, chat_request
from bench.load.report import machine_and_date, quantile_ms
from bench.load.workloads import WORDS
from bench.mesh import mock_env
from bench.processes import MESH_HOME, free_port, mesh, model_name
from engine.model.resolve import model_dir

PROBE_S: Final = 0.005
CONTEXT: Final = 131_072
HEALTH: Final = b"GET /health HTTP/1.1\r\nhost: bench\r\n\r\n"
LONG_BODIES: Final = 16  # prepared bodies, whose beginning each request changes


@dataclass(slots=True)
class Load:
    short_s: list[float] = field(default_factory=list)  # time to first token
    long_s: list[float] = field(default_factory=list)
    health_s: list[float] = field(default_factory=list)
    stall_s: list[float] = field(default_factory=list)  # stalls of this process
    failed: int = 0


class Probe(asyncio.Protocol):
    def __init__(self) -> None:
        self.answered = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        self.answered.set()


@contextmanager
def long_model() -> Iterator[str]:
    source = model_dir("smollm2-135m", MESH_HOME)
    with tempfile.TemporaryDirectory() as home:
        directory = Path(home) / "smollm2-long"
        directory.mkdir()
        for file in source.glob("*token*.json"):
            (directory / file.name).symlink_to(file)
        (directory / "chat_template.jinja").symlink_to(source / "chat_template.jinja")
        config = json.loads((source / "config.json").read_text()) | {"max_position_embeddings": CONTEXT}
        (directory / "config.json").write_text(json.dumps(config))
        yield f"mock:{directory}"


class Requests:
    """Requests whose prompts differ from the first words on."""

    def __init__(self, model: str, words: int, bodies: int) -> None:
        self._draw = random.Random(11)
        self._fields = {"model": model, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "stream": True}
        self._texts = [" ".join(self._draw.choices(WORDS, k=max(1, words - 12))) for _ in range(bodies)]

    def next(self) -> bytes:
        text = " ".join([*self._draw.choices(WORDS, k=12), self._draw.choice(self._texts)])
        return chat_request({**self._fields, "messages": [{"role": "user", "content": text}]})


async def _measure(port: int, short: Requests, long: Requests, rates: tuple[float, float], seconds: float) -> Load:
    load, loop = Load(), asyncio.get_running_loop()
    short_rate, long_rate = rates

    async def ask(requests: Requests, ttft_s: list[float]) -> None:
        request = requests.next()
        transport, client = await loop.create_connection(Client, "127.0.0.1", port)
        started = time.perf_counter()
        await client.ask(request)
        transport.close()
        if client.ok and client.first_s:
            ttft_s.append(client.first_s - started)
        else:
            load.failed += 1

    probing = [asyncio.create_task(_probe(port, load)), asyncio.create_task(_watch(load))]
    async with asyncio.TaskGroup() as arrivals:
        arrivals.create_task(_arrive(short_rate, seconds, lambda: ask(short, load.short_s)))
        arrivals.create_task(_arrive(long_rate, seconds, lambda: ask(long, load.long_s)))
    for task in probing:
        task.cancel()
    return load


async def _arrive(rate: float, seconds: float, ask: Callable[[], Awaitable[None]]) -> None:
    draw, until = random.Random(5), time.perf_counter() + seconds
    at = time.perf_counter()
    async with asyncio.TaskGroup() as asking:
        while rate and (at := at + draw.expovariate(rate)) < until:
            await asyncio.sleep(max(0.0, at - time.perf_counter()))
            asking.create_task(ask())  # type: ignore[arg-type]


async def _probe(port: int, load: Load) -> None:
    transport, probe = await asyncio.get_running_loop().create_connection(Probe, "127.0.0.1", port)
    while True:
        probe.answered.clear()
        started = time.perf_counter()
        transport.write(HEALTH)
        await probe.answered.wait()
        load.health_s.append(time.perf_counter() - started)
        await asyncio.sleep(PROBE_S)


async def _watch(load: Load) -> None:
    while True:
        started = time.perf_counter()
        await asyncio.sleep(PROBE_S)
        load.stall_s.append(time.perf_counter() - started - PROBE_S)


def _figures(load: Load, **facts: Any) -> dict[str, Any]:
    def quantiles(name: str, values: list[float]) -> dict[str, float]:
        return {f"{name}_p{q}": quantile_ms(values, q / 100) for q in (50, 90, 99)}

    return {
        **facts,
        "short": len(load.short_s),
        "long": len(load.long_s),
        "failed": load.failed,
        **quantiles("short_ttft_ms", load.short_s),
        **quantiles("long_ttft_ms", load.long_s),
        **quantiles("health_ms", load.health_s),
        "health_ms_max": quantile_ms(load.health_s, 1.0),
        "client_stall_ms_max": quantile_ms(load.stall_s, 1.0),
        **machine_and_date(),
    }


def main(
    long_tokens: Annotated[int, typer.Option(help="tokens of a long prompt")] = 60_000,
    long_rate: Annotated[float, typer.Option(help="long requests per second")] = 40.0,
    short_tokens: Annotated[int, typer.Option(help="tokens of a short prompt")] = 50,
    short_rate: Annotated[float, typer.Option(help="short requests per second")] = 20.0,
    seconds: Annotated[float, typer.Option(help="duration of each of the two loads")] = 10.0,
    frontend: Annotated[int, typer.Option(help="frontends that share the port")] = 1,
    prefill: Annotated[int, typer.Option(help="prefill workers; 0: aggregated")] = 1,
    label: Annotated[str, typer.Option(help="label in every line")] = "kvmesh",
) -> None:
    env = mock_env(1, {}) | {"MESH_ENGINE__NUM_PAGES": "262144"}
    facts = {"label": label, "frontend": frontend, "prefill": prefill, "long_tokens": long_tokens, "seconds": seconds}
    port = free_port()
    with long_model() as model, mesh(model, {"prefill": prefill, "frontend": frontend}, env, port):
        name = model_name(port)
        short, long = Requests(name, short_tokens, 64), Requests(name, long_tokens, LONG_BODIES)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_measure(port, short, long, (20.0, 1.0), 2.0))
            for rate in (0.0, long_rate):
                load = runner.run(_measure(port, short, long, (short_rate, rate), seconds))
                print(json.dumps(_figures(load, **facts, long_rate=rate, short_rate=short_rate)), flush=True)


if __name__ == "__main__":
    typer.run(main)
