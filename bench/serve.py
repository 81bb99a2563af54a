"""Load on an OpenAI endpoint: time to first token, time per output token, throughput. One JSON line a figure.

    python -m bench.serve --url http://127.0.0.1:8000 --model smollm2-135m --concurrency 1 8 --input-len 256 --output-len 64

Closed loop: each client sends its next request when the last is answered. Prompts are random English words, each prompt
different, so that no prefix cache helps. Works on any OpenAI endpoint that knows `ignore_eos`: peers are measured with it.
"""

import asyncio
import json
import platform
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

import httpx
import typer

WORDS = (
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "was",
    "for",
    "on",
    "that",
    "with",
    "as",
    "by",
    "at",
    "from",
    "it",
    "an",
    "are",
)


Body = dict[str, Any]
Prepare = Callable[[httpx.AsyncClient, Body], Awaitable[Body]]  # what is sent, from what was going to be sent


@dataclass(slots=True)
class Run:
    """What one level of concurrency measured; seconds."""

    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0  # as the endpoint counts them
    output_tokens: int = 0
    failed: int = 0
    duration_s: float = 0.0


def _prompt(draw: random.Random, length: int) -> str:
    # One short English word is one token in every common vocabulary, as long as a space stands before it.
    return " ".join(draw.choice(WORDS) for _ in range(length))


async def _one(client: httpx.AsyncClient, body: Body, run: Run, prepare: Prepare | None) -> None:
    started = last = time.perf_counter()
    if prepare is not None:
        body = await prepare(client, body)
    first: float | None = None
    prompt_tokens = tokens = 0
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            run.failed += 1
            await answer.aread()
            return
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            now = time.perf_counter()
            chunk = json.loads(line[6:])
            if usage := chunk.get("usage"):
                prompt_tokens, tokens = usage["prompt_tokens"], usage["completion_tokens"]
            if not chunk["choices"]:
                continue
            if first is None:
                first = now
            else:
                run.itl_s.append(now - last)
            last = now
    if first is None or tokens < 2:
        run.failed += 1
        return
    run.ttft_s.append(first - started)
    run.tpot_s.append((last - first) / (tokens - 1))
    run.prompt_tokens += prompt_tokens
    run.output_tokens += tokens


async def measure(
    url: str,
    model: str,
    *,
    concurrency: int,
    requests: int,
    input_len: int,
    output_len: int,
    prepare: Prepare | None = None,
) -> Run:
    """Send `requests` requests, `concurrency` at a time. What `prepare` does to one counts as time to its first token."""
    run = Run()
    draw = random.Random()  # seeded anew: prompts of an earlier run would be found in the prefix cache
    pending: list[Body] = [
        {
            "model": model,
            "prompt": _prompt(draw, input_len),
            "max_tokens": output_len,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for _ in range(requests)
    ]

    async def client_loop(client: httpx.AsyncClient) -> None:
        while pending:
            await _one(client, pending.pop(), run, prepare)

    async with httpx.AsyncClient(base_url=url, timeout=300, limits=httpx.Limits(max_connections=None)) as client:
        started = time.perf_counter()
        await asyncio.gather(*(client_loop(client) for _ in range(concurrency)))
        run.duration_s = time.perf_counter() - started
    return run


def figures(run: Run, **facts: Any) -> dict[str, Any]:
    """What is printed of a run: `facts` and what follows from its times."""

    def ms(values: list[float], quantile: float) -> float:
        return round(sorted(values)[min(len(values) - 1, int(len(values) * quantile))] * 1000, 2) if values else 0.0

    return {
        **facts,
        "requests": len(run.ttft_s),
        "failed": run.failed,
        "ttft_ms_p50": ms(run.ttft_s, 0.5),
        "ttft_ms_p90": ms(run.ttft_s, 0.9),
        "tpot_ms_p50": ms(run.tpot_s, 0.5),
        "itl_ms_p99": ms(run.itl_s, 0.99),
        "output_tok_s": round(run.output_tokens / run.duration_s, 1),
        "req_s": round(len(run.ttft_s) / run.duration_s, 2),
        "tpot_ms_mean": round(statistics.fmean(run.tpot_s) * 1000, 2) if run.tpot_s else 0.0,
        "machine": f"{platform.machine()} {platform.system()}",
        "date": time.strftime("%Y-%m-%d"),
    }


def main(
    url: Annotated[str, typer.Option(help="endpoint")] = "http://127.0.0.1:8000",
    model: Annotated[str, typer.Option(help="as the endpoint names it")] = "smollm2-135m",
    concurrency: Annotated[list[int], typer.Option(help="clients at once; may be given several times")] = [1, 8],  # noqa: B006
    requests: Annotated[int, typer.Option(help="requests per client")] = 6,
    input_len: Annotated[int, typer.Option(help="tokens")] = 256,
    output_len: Annotated[int, typer.Option(help="tokens")] = 64,
    label: Annotated[str, typer.Option(help="put into every line")] = "kvmesh",
) -> None:
    """Measure each level of concurrency in turn, after one request to warm up."""
    asyncio.run(measure(url, model, concurrency=1, requests=1, input_len=input_len, output_len=8))
    for clients in concurrency:
        shape: dict[str, Any] = {"concurrency": clients, "input_len": input_len, "output_len": output_len}
        run = asyncio.run(measure(url, model, requests=requests * clients, **shape))
        print(json.dumps(figures(run, label=label, **shape)), flush=True)


if __name__ == "__main__":
    typer.run(main)
