"""Closed-loop clients that use little CPU time, which the servers need.

Each client implements just enough HTTP to send a body and find the end of a stream. Token counts are taken from the
stream's usage, so an answer of the wrong length fails.
"""

import asyncio
import json
import random
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

from bench.load.client import full_answer
from bench.load.report import machine_and_date, quantile_ms
from bench.load.workloads import WORDS
from bench.processes import cpu_s, machine_busy_s

END: Final = b"data: [DONE]\n\n\r\n0\r\n\r\n"
ANSWER_S: Final = 120.0  # longer than any answer takes
TAIL_BYTES: Final = 1024  # holds the usage event and the end
EVENT: Final = b'data: {"'
PROMPT_TOKENS: Final = re.compile(rb'"prompt_tokens":(\d+)')
COMPLETION_TOKENS: Final = re.compile(rb'"completion_tokens":(\d+)')


@dataclass(slots=True)
class Run:
    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    duration_s: float = 0.0
    failed: int = 0  # refused, cut off, or of another length than requested
    answer_end: str = ""  # of a failed answer
    events: int = 0  # with text or an end
    prompt_tokens: set[int] = field(default_factory=set)  # reported by servers
    cpu_s: dict[str, float] = field(default_factory=dict)  # by process
    others_cpu_s: float = 0.0  # of everything else on the machine


class Prompts:
    """Request bodies whose prompts differ from the first words on."""

    def __init__(self, model: str, input_len: int, output_len: int) -> None:
        self.output_len = output_len
        self._draw = random.Random(7)
        self._words = [self._draw.choice(WORDS) for _ in range(50_000)]
        self._length = input_len
        self._fields = full_answer(model, output_len)

    def request(self) -> bytes:
        at = self._draw.randrange(len(self._words) - self._length)
        first = self._draw.choices(WORDS, k=12)
        text = " ".join([*first, *self._words[at : at + self._length - len(first)]])
        return chat_request({**self._fields, "messages": [{"role": "user", "content": text}]})


def chat_request(fields: Mapping[str, Any]) -> bytes:
    body = json.dumps(fields).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-length: {len(body)}\r\n"
    return f"{head}content-type: application/json\r\n\r\n".encode() + body


class Client(asyncio.Protocol):
    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answered: asyncio.Future[None] | None = None
        self._tail = b""
        self.first_s = 0.0
        self.last_s = 0.0
        self.events = 0
        self.ok = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_result(None)

    def data_received(self, data: bytes) -> None:
        if not self.first_s and b"data: " in data:
            self.first_s = time.perf_counter()
        refused = b'"error":' in data
        self.events += data.count(EVENT)
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        if refused or self._tail.endswith(END):
            self.ok = not refused
            self.last_s = time.perf_counter()
            if self._answered is not None and not self._answered.done():
                self._answered.set_result(None)

    async def ask(self, request: bytes) -> None:
        assert self._transport is not None
        self._answered = asyncio.get_running_loop().create_future()
        self.first_s, self.events, self.ok, self._tail = 0.0, 0, False, b""
        self._transport.write(request)
        await self._answered

    def answer_end(self) -> str:
        return self._tail[-300:].decode(errors="replace")

    def counted(self) -> tuple[int, int]:
        """Return the tokens of prompt and answer by the usage event; 0 if there is none."""
        found = PROMPT_TOKENS.findall(self._tail), COMPLETION_TOKENS.findall(self._tail)
        return int(found[0][-1]) if found[0] else 0, int(found[1][-1]) if found[1] else 0


async def measure(
    port: int, prompts: Prompts, pids: Mapping[str, Sequence[int]], concurrency: int, seconds: float
) -> Run:
    """Run the clients. Each stops after a failed request."""
    run = Run()
    loop = asyncio.get_running_loop()
    until = time.perf_counter() + seconds

    async def client_loop() -> None:
        transport, client = await loop.create_connection(Client, "127.0.0.1", port)
        going = True
        while going and time.perf_counter() < until:
            request = prompts.request()
            started = time.perf_counter()
            try:
                async with asyncio.timeout(ANSWER_S):
                    await client.ask(request)
            except TimeoutError:
                client.ok = False
            going = _note(run, client, started, prompts.output_len)
        transport.close()

    started, cpu, busy_s = time.perf_counter(), _cpu_s(pids), machine_busy_s()
    await asyncio.gather(*(client_loop() for _ in range(concurrency)))
    run.duration_s = time.perf_counter() - started
    run.cpu_s = {name: after - cpu[name] for name, after in _cpu_s(pids).items()}
    run.others_cpu_s = max(0.0, machine_busy_s() - busy_s - sum(run.cpu_s.values()))
    return run


def _note(run: Run, client: Client, started_s: float, output_len: int) -> bool:
    """Record an answer. Return whether it is as requested."""
    prompt_tokens, completion_tokens = client.counted()
    if not (client.ok and client.first_s and completion_tokens == output_len):
        run.failed += 1
        run.answer_end = client.answer_end()
        return False
    run.ttft_s.append(client.first_s - started_s)
    run.tpot_s.append((client.last_s - client.first_s) / max(1, output_len - 1))
    run.events += client.events
    run.prompt_tokens.add(prompt_tokens)
    return True


def _cpu_s(pids: Mapping[str, Sequence[int]]) -> dict[str, float]:
    return {name: cpu_s(some) for name, some in pids.items()}


def figures(run: Run, output_len: int, **facts: Any) -> dict[str, Any]:
    answered = len(run.ttft_s)
    thousands = answered * output_len / 1000 or 1.0

    return {
        **facts,
        "output_len": output_len,
        "prompt_tokens": sorted(run.prompt_tokens),
        "requests": answered,
        "failed": run.failed,
        "req_s": round(answered / run.duration_s, 1),
        "ttft_ms_p50": quantile_ms(run.ttft_s, 0.5),
        "ttft_ms_p90": quantile_ms(run.ttft_s, 0.9),
        "tpot_ms_p50": quantile_ms(run.tpot_s, 0.5),
        "events_per_request": round(run.events / (answered or 1), 1),
        "cpu_s_per_1k_tokens": {name: round(used_s / thousands, 4) for name, used_s in sorted(run.cpu_s.items())},
        "cores_used": round(sum(run.cpu_s.values()) / run.duration_s, 2),
        "cores_others": round(run.others_cpu_s / run.duration_s, 2),
        **machine_and_date(),
    }
