"""Sending requests to an OpenAI endpoint and timing what comes back."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

from bench.load.workloads import Ask

Body = dict[str, Any]
Prepare = Callable[[httpx.AsyncClient, Body], Awaitable[Body]]  # what is sent, from what was going to be sent

TIMEOUT_S: Final = 300.0
REASON_CHARS: Final = 200


@dataclass(slots=True)
class Run:
    """What one load measured; seconds."""

    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)
    ends_s: list[float] = field(
        default_factory=list
    )  # before an event that ends a text and brings none: no token's gap
    e2e_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0  # as the endpoint counts them
    output_tokens: int = 0
    failed: int = 0
    reasons: Counter[str] = field(default_factory=Counter)  # of failures
    duration_s: float = 0.0

    def fail(self, reason: str) -> None:
        """Count a request that brought nothing to measure."""
        self.failed += 1
        self.reasons[reason[:REASON_CHARS]] += 1


class Failed(Exception):
    """An endpoint's answer is not tokens."""


def body_of(ask: Ask, model: str) -> Body:
    """What is sent for `ask`; the answer has its full length whatever the model says."""
    return {
        "model": model,
        "prompt": ask.prompt,
        "max_tokens": ask.output_len,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def closed_loop(
    url: str,
    bodies: Sequence[Body],
    concurrency: int,
    prepare: Prepare | None = None,
    done: Callable[[], object] = lambda: None,
) -> Run:
    """`concurrency` clients, each of which sends its next request when the last is answered."""
    run = Run()
    pending = list(bodies)

    async def client_loop(client: httpx.AsyncClient) -> None:
        while pending:
            await _one(client, pending.pop(), run, prepare)
            done()

    async with _client(url) as client:
        started = time.perf_counter()
        await asyncio.gather(*(client_loop(client) for _ in range(concurrency)))
        run.duration_s = time.perf_counter() - started
    return run


async def open_loop(url: str, bodies: Sequence[tuple[float, Body]], done: Callable[[], object] = lambda: None) -> Run:
    """Each request at its time, seconds after the start and in order, whatever became of those before it."""
    run = Run()

    async def send(client: httpx.AsyncClient, body: Body) -> None:
        await _one(client, body, run, None)
        done()

    async with _client(url) as client, asyncio.TaskGroup() as group:
        started = time.perf_counter()
        tasks = []
        for at_s, body in bodies:
            await asyncio.sleep(max(0.0, started + at_s - time.perf_counter()))
            tasks.append(group.create_task(send(client, body)))
        if tasks:
            await asyncio.wait(tasks)
        run.duration_s = time.perf_counter() - started
    return run


def _client(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=httpx.Limits(max_connections=None))


async def _one(client: httpx.AsyncClient, body: Body, run: Run, prepare: Prepare | None) -> None:
    try:
        await _stream(client, body, run, prepare)
    except Failed as exc:
        run.fail(str(exc))
    except (httpx.HTTPError, ValueError, LookupError) as exc:
        run.fail(f"{type(exc).__name__}: {exc}")


async def _stream(client: httpx.AsyncClient, body: Body, run: Run, prepare: Prepare | None) -> None:
    started = last = time.perf_counter()
    if prepare is not None:
        body = await prepare(client, body)
    first: float | None = None
    gaps_s: list[float] = []
    ends_s: list[float] = []
    prompt_tokens = tokens = 0
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            raise Failed(f"HTTP {answer.status_code}: {(await answer.aread()).decode(errors='replace')}")
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            now = time.perf_counter()
            chunk = json.loads(line[6:])
            if error := chunk.get("error"):
                raise Failed(f"the stream broke: {error}")
            if usage := chunk.get("usage"):
                prompt_tokens, tokens = usage["prompt_tokens"], usage["completion_tokens"]
            if not chunk["choices"]:
                continue
            if first is None:
                first = now
            else:
                choice = chunk["choices"][0]
                bare = choice.get("finish_reason") is not None and not choice.get("text")
                (ends_s if bare else gaps_s).append(now - last)
            last = now
    if first is None or tokens < 1:
        raise Failed("an answer without tokens" if tokens < 1 else "an answer without text")
    run.itl_s += gaps_s
    run.ends_s += ends_s
    run.ttft_s.append(first - started)
    run.e2e_s.append(last - started)
    if tokens > 1:
        run.tpot_s.append((last - first) / (tokens - 1))
    run.prompt_tokens += prompt_tokens
    run.output_tokens += tokens
