"""Sends requests to an OpenAI endpoint and measures the times of the answers."""

import asyncio
import json
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

from bench.load.workloads import PlannedRequest

Body = dict[str, Any]
Prepare = Callable[[httpx.AsyncClient, Body], Awaitable[Body]]  # planned body → body to send

TIMEOUT_S: Final = 300.0
REASON_CHARS: Final = 200


@dataclass(slots=True)
class Run:
    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)
    ends_s: list[float] = field(default_factory=list)  # gaps before final events without a token
    e2e_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0  # as counted by the endpoint
    output_tokens: int = 0
    failed: int = 0
    reasons: Counter[str] = field(default_factory=Counter)  # reasons of failures
    duration_s: float = 0.0
    started_s: float = 0.0  # perf_counter() of the first request
    in_flight: int = 0
    peak_in_flight: int = 0
    cut_off: int = 0  # in flight when the run ended
    # output tokens, by the number of the second after `started_s`
    tokens_in_second: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def peak_tokens(self) -> float:
        return max(self.tokens_in_second.values(), default=0.0)

    @contextmanager
    def under_way(self) -> Iterator[None]:
        self.in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
        try:
            yield
        except asyncio.CancelledError:
            self.cut_off += 1
            raise
        finally:
            self.in_flight -= 1

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Measure the duration, and keep the results if the run is interrupted."""
        self.started_s = time.perf_counter()
        try:
            yield
        finally:
            self.duration_s = time.perf_counter() - self.started_s

    def record_tokens(self, times_s: Sequence[float], tokens: int) -> None:
        """Record that an answer's `tokens` arrived in events at `times_s`, assumed to be in equal shares."""
        for time_s in times_s:
            self.tokens_in_second[int(time_s - self.started_s)] += tokens / len(times_s)

    def fail(self, reason: str) -> None:
        self.failed += 1
        self.reasons[reason[:REASON_CHARS]] += 1


class Failed(Exception):
    pass


def body_of(request: PlannedRequest, model: str) -> Body:
    return {"prompt": request.prompt, **full_answer(model, request.output_len)}


def chat_body(messages: Sequence[Mapping[str, str]], output_len: int, model: str) -> Body:
    return {"messages": list(messages), **full_answer(model, output_len)}


def full_answer(model: str, output_len: int) -> Body:
    return {
        "model": model,
        "max_tokens": output_len,
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
    run: Run | None = None,
) -> Run:
    """Run `concurrency` clients, each with one request at a time.

    Returns: `run`, which is also filled if this is cancelled.
    """
    run = run or Run()
    pending = iter(bodies)

    async def client_loop(client: httpx.AsyncClient) -> None:
        for body in pending:
            await exchange(client, body, run, prepare)
            done()

    async with open_client(url) as client:
        with run.timed():
            await asyncio.gather(*(client_loop(client) for _ in range(concurrency)))
    return run


async def open_loop(
    url: str,
    bodies: Sequence[tuple[float, Body]],
    done: Callable[[], object] = lambda: None,
    run: Run | None = None,
    max_concurrency: int | None = None,
) -> Run:
    """Send each request at its time in seconds after the start.

    With `max_concurrency` a request waits until fewer are in flight, and its times are measured from when it is sent.
    Returns: the same as `closed_loop`.
    """
    run = run or Run()
    places = asyncio.Semaphore(max_concurrency or max(1, len(bodies)))

    async def send(client: httpx.AsyncClient, body: Body) -> None:
        async with places:
            await exchange(client, body, run)
        done()

    async with open_client(url) as client:
        with run.timed():
            async with asyncio.TaskGroup() as group:
                for at_s, body in bodies:
                    await asyncio.sleep(max(0.0, run.started_s + at_s - time.perf_counter()))
                    group.create_task(send(client, body))
    return run


def open_client(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=httpx.Limits(max_connections=None))


async def exchange(client: httpx.AsyncClient, body: Body, run: Run, prepare: Prepare | None = None) -> str | None:
    """Send one request, for completions or, with `messages`, for chat, and add its times to `run`.

    Returns: the answer's text; None if it failed, which `run` counts.
    """
    try:
        with run.under_way():
            return await _stream(client, body, run, prepare)
    except Failed as exc:
        run.fail(str(exc))
    except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError) as exc:  # or other JSON than a chunk
        run.fail(f"{type(exc).__name__}: {exc}")
    return None


async def _stream(client: httpx.AsyncClient, body: Body, run: Run, prepare: Prepare | None) -> str:
    started = last = time.perf_counter()
    if prepare is not None:
        body = await prepare(client, body)
    first: float | None = None
    gaps_s: list[float] = []
    ends_s: list[float] = []
    texts: list[str] = []
    times_s: list[float] = []  # of events with text
    prompt_tokens = tokens = 0
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    async with client.stream("POST", path, json=body) as answer:
        if answer.status_code != 200:
            raise Failed(f"HTTP {answer.status_code}: {(await answer.aread()).decode(errors='replace')}")
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            now = time.perf_counter()
            chunk = json.loads(line[6:])
            if error := chunk.get("error"):
                raise Failed(f"the stream failed: {error}")
            if usage := chunk.get("usage"):
                prompt_tokens, tokens = usage["prompt_tokens"], usage["completion_tokens"]
            if not chunk["choices"]:
                continue
            choice = chunk["choices"][0]
            text = choice.get("text") or choice.get("delta", {}).get("content")
            ends = choice.get("finish_reason") is not None
            if "delta" in choice and not text and not ends:
                continue  # the role, or an empty delta
            if first is None:
                first = now
            else:
                (ends_s if ends and not text else gaps_s).append(now - last)
            last = now
            texts.append(text or "")
            times_s += [now] * bool(text)
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
    run.record_tokens(times_s, tokens)
    return "".join(texts)
