"""A whole mesh on one device: prefill and decode beside each other, against one worker that does both."""

import asyncio
import random
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import httpx

from bench.gpu.engines import EXACT, exact_ids, requests, saved
from bench.gpu.report import Report, Target, tell
from bench.gpu.scale import TINY, Scale
from bench.load.client import Run, closed_loop, full_answer
from bench.load.report import figures
from bench.processes import free_port, mesh, model_name
from engine.ports import EngineRequest

START_S = 500.0  # both workers compile
SHORTEST = 100  # tokens, or the longest
SPLIT: Mapping[str, int] = {"prefill": 1, "decode": 1}
WHOLE: Mapping[str, int] = {"prefill": 0, "decode": 1}


def measure_mesh(scale: Scale, report: Report) -> bool:
    with ExitStack() as stack:
        tiny = stack.enter_context(saved(TINY)) / "config.json"
        model = tiny if scale.on_cpu else stack.enter_context(saved(scale.model)) / "config.json"
        same, runs = True, {}
        if not scale.on_cpu:
            few_pages = _env(scale, EXACT["dtype"]) | {"MESH_ENGINE__NUM_PAGES": str(EXACT["num_pages"])}
            with mesh(str(tiny), SPLIT, few_pages, port := free_port(), START_S):
                same = _same_ids(scale, port)
        for name, counts in {"disaggregated": SPLIT, "aggregated": WHOLE}.items():
            with mesh(str(model), counts, _env(scale, scale.dtype), port := free_port(), START_S):
                if scale.on_cpu and counts is SPLIT:
                    same = _same_ids(scale, port)
                runs[name] = _loaded(scale, port)
            tell("whole mesh on one device", **figures(runs[name], mesh=name, clients=scale.clients))
    _judge(report, runs["disaggregated"], runs["aggregated"])
    return same and not any(run.failed for run in runs.values())


def _judge(report: Report, split: Run, whole: Run) -> None:
    speeds = [run.output_tokens / run.duration_s for run in (split, whole)]
    report.reach(Target.LOAD, speeds[1])
    report.reach(Target.SPLIT, speeds[0] / speeds[1])
    if split.ttft_s and whole.ttft_s:
        medians = [sorted(run.ttft_s)[len(run.ttft_s) // 2] for run in (split, whole)]
        report.reach(Target.SPLIT_TTFT, medians[0] / medians[1])


def _env(scale: Scale, dtype: str) -> dict[str, str]:
    """Local prefill would take prompts from the prefill worker."""
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
    """Ids of the mesh and of one engine, fp32 and greedy."""
    asked = requests(TINY["vocab_size"], 8, prompts=(3, 120), outputs=(8, 24), seed=5)
    found = asyncio.run(_ask(port, asked))
    expected = exact_ids(scale, asked)
    same = found == [expected[request.request_id] for request in asked]
    tell("ids of a mesh and of one engine", same=same, tokens=sum(map(len, found)))
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

    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120.0) as client:
        return list(await asyncio.gather(*(one(client, request) for request in asked)))


def _loaded(scale: Scale, port: int) -> Run:
    """Requests of random lengths, each of another prompt."""
    draw, name, bodies = random.Random(3), model_name(port), []
    vocab_size, lengths = scale.model["vocab_size"], (min(SHORTEST, scale.longest), scale.longest)
    for _ in range(scale.requests + scale.clients):
        prompt = [draw.randrange(vocab_size) for _ in range(draw.randint(*lengths))]
        body: dict[str, Any] = {**full_answer(name, draw.randint(*lengths)), "prompt": prompt}
        bodies.append(body)
    url = f"http://127.0.0.1:{port}"
    asyncio.run(closed_loop(url, bodies[: scale.clients], scale.clients))  # warms up
    return asyncio.run(closed_loop(url, bodies[scale.clients :], scale.clients))
