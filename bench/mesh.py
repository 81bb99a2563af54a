"""What the mesh itself costs: engines that compute nothing, streams through every process. One JSON line a figure.

    python -m bench.mesh                        # zero-cost, disaggregated, 230 tokens in, 64 out, c = 1, 16, 64
    python -m bench.mesh --token-ms 5.7         # paced: a token each 5.7 ms
    python -m bench.mesh --prefill 0            # aggregated

It starts a mesh of its own with `python -m services.local`. Closed loop: each client sends its next request when the last
is answered. Every prompt is another, so that each is computed by prefill and moved. The client speaks just enough HTTP to
send a body and see the end of a stream, so that it takes little from the cores it shares with the mesh.
"""

import asyncio
import json
import os
import platform
import random
import time
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, cast

import typer
import uvloop

from bench.load.report import quantile_ms
from bench.processes import cpu_s, free_port, mesh, model_name
from bench.serve import WORDS

END: Final = b"data: [DONE]\n\n\r\n0\r\n\r\n"  # the last event in the last chunk


@dataclass(slots=True)
class Run:
    """What one level of concurrency measured."""

    ttft_s: list[float] = field(default_factory=list)
    duration_s: float = 0.0
    failed: int = 0
    cpu_s: dict[str, float] = field(default_factory=dict)  # by process


class Prompts:
    """Request bodies whose prompts differ from their first words on."""

    def __init__(self, model: str, input_len: int, output_len: int) -> None:
        self._draw = random.Random(7)
        self._words = [self._draw.choice(WORDS) for _ in range(50_000)]
        self._length = input_len
        self._fields = {
            "model": model,
            "max_tokens": output_len,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }

    def request(self) -> bytes:
        """The bytes of one HTTP request."""
        at = self._draw.randrange(len(self._words) - self._length)
        first = self._draw.choices(WORDS, k=12)  # 18^12 beginnings
        text = " ".join([*first, *self._words[at : at + self._length - len(first)]])
        body = json.dumps({**self._fields, "messages": [{"role": "user", "content": text}]}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-length: {len(body)}\r\n"
        return f"{head}content-type: application/json\r\n\r\n".encode() + body


class Client(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answered: asyncio.Future[None] | None = None
        self._tail = b""
        self.first_s = 0.0
        self.ok = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_result(None)

    def data_received(self, data: bytes) -> None:
        if not self.first_s and b"data: " in data:
            self.first_s = time.perf_counter()
        refused = b'"error":' in data  # before the stream or within it
        self._tail = (self._tail + data)[-len(END) :]
        if refused or self._tail == END:
            self.ok = not refused
            if self._answered is not None and not self._answered.done():
                self._answered.set_result(None)

    async def ask(self, request: bytes) -> None:
        """Send a request; returns when its stream has ended, well if `ok`."""
        assert self._transport is not None
        self._answered = asyncio.get_running_loop().create_future()
        self.first_s, self.ok, self._tail = 0.0, False, b""
        self._transport.write(request)
        await self._answered


async def _measure(port: int, prompts: Prompts, pids: dict[str, list[int]], concurrency: int, seconds: float) -> Run:
    run = Run()
    loop = asyncio.get_running_loop()
    until = time.perf_counter() + seconds

    async def client_loop() -> None:
        _, client = await loop.create_connection(Client, "127.0.0.1", port)
        while time.perf_counter() < until:
            request = prompts.request()
            started = time.perf_counter()
            await client.ask(request)
            if client.ok and client.first_s:
                run.ttft_s.append(client.first_s - started)
            else:
                run.failed += 1
                return

    started, cpu = time.perf_counter(), _cpu_s(pids)
    await asyncio.gather(*(client_loop() for _ in range(concurrency)))
    run.duration_s = time.perf_counter() - started
    run.cpu_s = {name: after - cpu[name] for name, after in _cpu_s(pids).items()}
    return run


def _cpu_s(pids: dict[str, list[int]]) -> dict[str, float]:
    return {name: cpu_s(some) for name, some in pids.items()}


def _figures(run: Run, output_len: int, **facts: Any) -> dict[str, Any]:
    thousands = len(run.ttft_s) * output_len / 1000 or 1.0

    return {
        **facts,
        "output_len": output_len,
        "requests": len(run.ttft_s),
        "failed": run.failed,
        "req_s": round(len(run.ttft_s) / run.duration_s, 1),
        "ttft_ms_p50": quantile_ms(run.ttft_s, 0.5),
        "ttft_ms_p90": quantile_ms(run.ttft_s, 0.9),
        "cpu_s_per_1k_tokens": {name: round(cpu_s / thousands, 4) for name, cpu_s in sorted(run.cpu_s.items())},
        "cores_used": round(sum(run.cpu_s.values()) / run.duration_s, 2),
        "machine": f"{platform.machine()} {platform.system()}, {os.cpu_count()} cores",
        "date": time.strftime("%Y-%m-%d"),
    }


def main(
    concurrency: Annotated[list[int], typer.Option(help="clients at once; may be given several times")] = [1, 16, 64],  # noqa: B006
    seconds: Annotated[float, typer.Option(help="for each level, after a warm-up of two")] = 8.0,
    input_len: Annotated[
        int, typer.Option(help="words of the prompt, a token each; the chat template adds some")
    ] = 200,
    output_len: Annotated[int, typer.Option(help="tokens")] = 64,
    token_ms: Annotated[float, typer.Option(help="time of a decode step; 0: none, nor of anything else")] = 0.0,
    model: Annotated[str, typer.Option(help="mock, or mock:<model> for that model's tokenizer")] = "mock:smollm2-135m",
    prefill: Annotated[int, typer.Option(help="prefill workers; 0: aggregated")] = 1,
    decode: Annotated[int, typer.Option(help="decode workers")] = 1,
    layers: Annotated[
        int, typer.Option(help="of a KV page: 512 bytes each; with 720, NIXL moves what SmolLM2 has")
    ] = 1,
    traces_per_s: Annotated[float, typer.Option(help="requests traced a second, at most")] = 20.0,
    label: Annotated[str, typer.Option(help="put into every line")] = "kvmesh",
) -> None:
    """Measure each level of concurrency in turn."""
    mock: dict[str, object] = {
        "LAYERS": layers,
        "KV_HEADS": 1,
        "HEAD_DIM": 8,
        "DECODE_S": 0,
        "CONTEXT_TOKEN_S": 0,
        "PROMPT_TOKEN_S": 0,
    }
    mock |= {"STEP_S": token_ms / 1000} if token_ms else {"STEP_S": 0, "SPEEDUP": "inf"}
    env = {f"MESH_ENGINE__MOCK__{name}": str(value) for name, value in mock.items()}
    env |= {"MESH_ENGINE__NUM_PAGES": "8192", "MESH_ENGINE__MAX_RUNNING": "256", "MESH_ENGINE__MAX_STEP_TOKENS": "8192"}
    env["MESH_TRACES_PER_S"] = str(traces_per_s)
    facts = {"label": label, "prefill": prefill, "decode": decode, "token_ms": token_ms, "layers": layers}
    facts["traces_per_s"] = traces_per_s
    port = free_port()
    with mesh(model, {"prefill": prefill, "decode": decode}, env, port) as server:
        pids = {"client": [os.getpid()], **server.processes()}
        prompts = Prompts(model_name(port), input_len, output_len)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_measure(port, prompts, pids, concurrency=4, seconds=2.0))
            for clients in concurrency:
                run = runner.run(_measure(port, prompts, pids, clients, seconds))
                figures = _figures(run, output_len, **facts, concurrency=clients, input_len=input_len)
                print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    typer.run(main)
