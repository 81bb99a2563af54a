"""A whole mesh on one device: a prefill and a decode worker, compared with one worker that does both."""

import asyncio
import random
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from bench.gpu.engines import EXACT, exact_ids, requests, saved
from bench.gpu.report import Report, Target, print_figure
from bench.gpu.scale import TINY, Scale
from bench.load.client import Run, closed_loop, full_answer
from bench.load.report import figures
from bench.processes import Server, free_port, mesh, model_name
from bench.worker_counters import Counters
from engine.ports import EngineRequest

START_S = 500.0  # both workers compile
ASKED = 8  # requests whose ids are compared
SHORTEST = 100  # minimum length in tokens, unless the longest is shorter
SPLIT: Mapping[str, int] = {"prefill": 1, "decode": 1}
WHOLE: Mapping[str, int] = {"prefill": 0, "decode": 1}


def check_mesh(scale: Scale, keep: Path | None = None) -> bool:
    """Compare ids from a prefill and a decode worker, with checksums of all KV, to one engine's. The model is tiny."""
    env = _env(scale, EXACT["dtype"]) | {
        "MESH_ENGINE__NUM_PAGES": str(EXACT["num_pages"]),
        "MESH_DECODE_VERIFY_KV": "true",
    }
    with saved(TINY) as model, _mesh(model, SPLIT, env, keep, "ids") as (server, port):
        counters = _counters(server)
        return all([_same_ids(scale, port), _all_transferred(counters, ASKED)])


def measure_mesh(scale: Scale, report: Report, keep: Path | None = None) -> bool:
    """Measure the mesh. `keep`: directory for the logs of all processes."""
    runs: dict[str, Run] = {}
    right = True
    with saved(scale.model) as model:
        for name, counts in {"disaggregated": SPLIT, "aggregated": WHOLE}.items():
            with _mesh(model, counts, _env(scale, scale.dtype), keep, name) as (server, port):
                bodies = _bodies(scale, port)
                asyncio.run(closed_loop(_url(port), bodies[: scale.clients], scale.clients))  # warms up
                counters = _counters(server)
                runs[name] = asyncio.run(closed_loop(_url(port), bodies[scale.clients :], scale.clients))
                right = right and (counts is WHOLE or _all_transferred(counters, scale.requests))
            print_figure("whole mesh on one device", **figures(runs[name], mesh=name, clients=scale.clients))
    _judge(report, runs["disaggregated"], runs["aggregated"])
    return right and not any(run.failed for run in runs.values())


@contextmanager
def _mesh(
    model: Path, counts: Mapping[str, int], env: Mapping[str, str], keep: Path | None, name: str
) -> Iterator[tuple[Server, int]]:
    """Run a mesh. Yields: its processes, and the port of its endpoint."""
    port = free_port()
    with mesh(str(model / "config.json"), counts, env, port, START_S) as server:
        try:
            yield server, port
        finally:
            if keep is not None:
                shutil.copy(server.log, keep / f"{name}.log")


def _counters(server: Server) -> Counters:
    return Counters(server, ("prefill", "decode"))


def _all_transferred(counters: Counters, requests: int) -> bool:
    """Return whether the KV of all prompts was transferred; decode computes a prompt whose KV does not arrive."""
    (prefill,), (decode,) = counters.now()
    facts = {"requests": requests, "transfers": prefill.transfers, "computed_by_decode": decode.computed}
    right = prefill.transfers == requests and not decode.computed
    print_figure("KV from prefill to decode", **facts, same=right)
    return right


def _judge(report: Report, split: Run, whole: Run) -> None:
    speeds = [run.output_tokens / run.duration_s for run in (split, whole)]
    report.record(Target.LOAD, speeds[1])
    report.record(Target.SPLIT, speeds[0] / speeds[1])
    if split.ttft_s and whole.ttft_s:
        medians = [sorted(run.ttft_s)[len(run.ttft_s) // 2] for run in (split, whole)]
        report.record(Target.SPLIT_TTFT, medians[0] / medians[1])


def _env(scale: Scale, dtype: str) -> dict[str, str]:
    """Return the environment, without local prefill."""
    env = {
        "MESH_ENGINE__DEVICE": scale.device,
        "MESH_ENGINE__DTYPE": dtype,
        "MESH_DECODE_MAX_LOCAL_PREFILL": "0",
        "MESH_DECODE_LOCAL_PREFILL_ON_QUEUE": "false",
    }
    if scale.on_cpu:
        env |= {"MESH_ENGINE__COMPILE": "off", "MESH_ENGINE__ATTENTION": "torch", "MESH_ENGINE__NUM_PAGES": "200"}
    return env


def _same_ids(scale: Scale, port: int) -> bool:
    """Compare greedy ids in fp32 of the mesh and of one engine."""
    asked = requests(TINY["vocab_size"], ASKED, prompts=(3, 120), outputs=(8, 24), seed=5)
    found = asyncio.run(_ask(port, asked))
    expected = exact_ids(scale, asked)
    same = found == [expected[request.request_id] for request in asked]
    print_figure("ids of a mesh and of one engine", same=same, tokens=sum(map(len, found)))
    return same


async def _ask(port: int, asked: list[EngineRequest]) -> list[list[int]]:
    name = await asyncio.to_thread(model_name, port)

    async def one(client: httpx.AsyncClient, request: EngineRequest) -> list[int]:
        body = {**full_answer(name, request.sampling.max_tokens), "prompt": list(request.token_ids)}
        body |= {"stream": False, "stream_options": None, "return_token_ids": True}
        answer = await client.post("/v1/completions", json=body)
        answer.raise_for_status()
        ids: list[int] = answer.json()["choices"][0]["token_ids"]
        return ids

    async with httpx.AsyncClient(base_url=_url(port), timeout=120.0) as client:
        return list(await asyncio.gather(*(one(client, request) for request in asked)))


def _bodies(scale: Scale, port: int) -> list[dict[str, Any]]:
    """Return requests of random lengths; the first `scale.clients` are for a warm-up."""
    draw, name, bodies = random.Random(3), model_name(port), []
    vocab_size, lengths = scale.model["vocab_size"], (min(SHORTEST, scale.longest), scale.longest)
    for _ in range(scale.requests + scale.clients):
        prompt = [draw.randrange(vocab_size) for _ in range(draw.randint(*lengths))]
        bodies.append({**full_answer(name, draw.randint(*lengths)), "prompt": prompt})
    return bodies


def _url(port: int) -> str:
    return f"http://127.0.0.1:{port}"
