"""Compares kvmesh's mock engine with NVIDIA Dynamo's mocker under the same load. Prints one JSON line per figure.

    python -m bench.peers.dynamo --dynamo DIRECTORY

`bench/peers/make_dynamo.sh` makes the DIRECTORY. Each turn starts one system, measures it alone and stops it. Dynamo
runs as shipped and with TCP_NODELAY. Both validate, count metrics, cache prefixes, route by KV and pair workers by a
bootstrap. The last lines are ratios of medians over rounds. A target is judged only if a repeated prompt has shown
that both route by KV.
"""

import asyncio
import http.client
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import StrEnum, auto
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.request import urlopen

import typer
import uvloop

from bench.closed_loop import Prompts, figures, measure
from bench.mesh import mock_env
from bench.peers.arguments import model_directory, name_values
from bench.peers.dynamo_servers import (
    NO_COST,
    VERSION,
    Dynamo,
    NoDelay,
    check_environment,
    routed_cached_tokens,
    start_dynamo,
)
from bench.processes import free_port, mesh, model_name
from bench.turns import Concurrency, OutputLen, Rounds, Target, compare
from components.telemetry.trace_store import TraceStore

KVMESH, STOCK, NODELAY = "kvmesh", "dynamo", "dynamo+nodelay"
COMPARED: Final = ("req_s", "ttft_ms_p50", "frontend_cpu_s_per_1k_tokens", "servers_cpu_s_per_1k_tokens")
WARM_UP_S: Final = 3.0
WARM_UP_CLIENTS: Final = 16
EVENTS_ARRIVE_S: Final = 1.0  # time until KV events have reached the router
SPANS_ARRIVE_S: Final = 15.0


class Case(StrEnum):
    aggregated = auto()  # one worker, no cost
    disaggregated = auto()  # prefill and decode, no cost
    paced = auto()  # the same with the mocker's step times
    # kvmesh's tokens take time, but its prompts do not; Dynamo is paced. The target was derived from this case.
    tokens = auto()


# The mocker's times at --speedup-ratio 1. Decodes: 5.74 ms, plus 54 ms times the used share of 2^20 tokens of KV.
# Prompts: 16.5 ms, 15.2 us per token, 0.42 ns per token squared. Streams have 5.76 ms per token at 1 client, 5.96 at
# 16, 6.6 at 64.
PACED: Final = {
    "MESH_DECODE_ENGINE__MOCK__STEP_S": "0.00574",
    "MESH_DECODE_ENGINE__MOCK__CONTEXT_TOKEN_S": f"{0.05401 / 2**20:.3g}",
    "MESH_PREFILL_ENGINE__MOCK__STEP_S": "0.0165",
    "MESH_PREFILL_ENGINE__MOCK__PROMPT_TOKEN_S": "1.518e-5",
    "MESH_PREFILL_ENGINE__MOCK__ATTENTION_S": "8.4e-10",
}
TOKENS: Final = {"MESH_DECODE_ENGINE__MOCK__STEP_S": "0.0057"}
FAIR: Final = [Case.aggregated, Case.disaggregated, Case.paced]  # cases in which both take the same time
COSTS: Final[dict[Case, dict[str, str]]] = {Case.paced: PACED, Case.tokens: TOKENS}
TARGETS: Final = {
    Case.aggregated: (),
    Case.disaggregated: (
        Target("req_s", 1400, [64], own=True),
        Target("req_s", 1.7, [64]),
        Target("ttft_ms_p50", 1.0, [1]),
    ),
    **dict.fromkeys(
        (Case.paced, Case.tokens),
        (Target("req_s", 1.2, [64]), Target("frontend_cpu_s_per_1k_tokens", 0.020, [64], own=True)),
    ),
}


@dataclass(frozen=True, slots=True)
class Up:
    name: str
    port: int
    model: str
    pids: Mapping[str, Sequence[int]]
    routes_by_kv: Callable[[], bool]  # after a prompt was sent twice


Start = Callable[[], AbstractContextManager[Up]]


@contextmanager
def start_kvmesh(case: Case, model: str, env: Mapping[str, str]) -> Iterator[Up]:
    costs = mock_env(1, {"SPEEDUP": 1} if case in COSTS else {}) | COSTS.get(case, {})
    prefill, port = int(case is not Case.aggregated), free_port()
    with mesh(model, {"prefill": prefill, "decode": 1}, {**costs, **env}, port) as server:
        yield Up(
            KVMESH, port, model_name(port), server.processes(), partial(_spans_show_kv_transfers, server.log.parent)
        )


@contextmanager
def start_peer(environment: Path, case: Case, model_dir: str, name: str, nodelay: NoDelay) -> Iterator[Up]:
    port, speedup = free_port(), 1.0 if case in COSTS else NO_COST
    what = Dynamo(environment, model_dir, name, case is not Case.aggregated, speedup, nodelay)
    with start_dynamo(what, port) as servers:
        pids = {name: [pid for pids in server.processes().values() for pid in pids] for name, server in servers.items()}

        def routes_by_kv() -> bool:
            with urlopen(f"http://127.0.0.1:{port}/metrics") as page:
                return routed_cached_tokens(page.read().decode()) > 0

        yield Up(f"Dynamo, nodelay {nodelay}", port, model_name(port), pids, routes_by_kv)


def _spans_show_kv_transfers(state_dir: Path) -> bool:
    """Return whether a routing choice found the repeated prompt cached. The latest spans may still be missing."""
    store, deadline = TraceStore(state_dir), time.monotonic() + SPANS_ARRIVE_S
    while time.monotonic() < deadline:
        traces = [store.trace(trace_id) for trace_id in store.last_trace_ids()]
        if any(span.attributes.get("kvmesh.route.cached_tokens", 0) for spans in traces for span in spans):
            return True
        if sum(span.name == "frontend.first_token" for spans in traces for span in spans) > 1:
            return False
        time.sleep(0.2)
    return False


def stream_once(port: int, request: bytes) -> tuple[int, int]:
    """Stream one answer. Return its events with text, and its tokens by the usage."""
    head, _, body = request.partition(b"\r\n\r\n")
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", head.split()[1].decode(), body, {"content-type": "application/json"})
    answer = connection.getresponse().read().decode()
    connection.close()
    return count_stream(answer)


def count_stream(text: str) -> tuple[int, int]:
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    if not events or "error" in events[-1]:
        sys.exit(f"no stream: {text[:500]}")
    texts = sum(any(choice["delta"].get("content") for choice in event["choices"]) for event in events)
    usages = [event["usage"] for event in events if event.get("usage")]
    return texts, usages[-1]["completion_tokens"] if usages else 0


def turn(
    start: Start, input_len: int, output_len: int, concurrency: Sequence[int], seconds: float
) -> list[dict[str, Any]]:
    """Measure one system. Exit if a request failed or had the wrong length."""
    lines = []
    with start() as up, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        prompts = Prompts(up.model, input_len, output_len)
        twice, facts = prompts.request(), {}
        for _ in range(2):
            facts["events_with_text_alone"], num_tokens = stream_once(up.port, twice)
            if num_tokens != output_len:
                sys.exit(f"{up.name}: requested {output_len} tokens, got {num_tokens}")
            time.sleep(EVENTS_ARRIVE_S)
        facts["routes_by_kv"] = up.routes_by_kv()
        pids = {"client": [os.getpid()], **up.pids}
        runner.run(measure(up.port, prompts, {}, WARM_UP_CLIENTS, WARM_UP_S))
        for clients in concurrency:
            run = runner.run(measure(up.port, prompts, pids, clients, seconds))
            if run.failed:
                asked = run.failed + len(run.ttft_s)
                sys.exit(f"{up.name}: of {asked} requests {run.failed} failed at {clients} clients: {run.answer_end}")
            lines.append(with_sums(figures(run, output_len, concurrency=clients, **facts)))
    return lines


def with_sums(line: dict[str, Any]) -> dict[str, Any]:
    """Return the line with the CPU time of the frontend and of all servers."""
    spent = line["cpu_s_per_1k_tokens"]
    servers = sum(used_s for name, used_s in spent.items() if name != "client")
    return {
        **line,
        "frontend_cpu_s_per_1k_tokens": spent["frontend"],
        "servers_cpu_s_per_1k_tokens": round(servers, 4),
    }


def verdicts(lines: Sequence[Mapping[str, Any]], case: Case, clients: int) -> Iterator[dict[str, Any]]:
    """Yield the ratios. Targets are relative to Dynamo with TCP_NODELAY."""
    here = [line for line in lines if line["case"] == case and line["concurrency"] == clients]
    for peer in (STOCK, NODELAY):
        both = [line for line in here if line["label"] in (KVMESH, peer)]
        compared = (*COMPARED, "tpot_ms_p50") if case in COSTS else COMPARED
        ratios = compare(here, (KVMESH, peer), clients, TARGETS[case] if peer == NODELAY else (), compared)
        everything_on = all(line["routes_by_kv"] for line in both)
        for name in [name for name in ratios if name.startswith("met_")]:
            ratios[name] = ratios[name] and everything_on
        others = max(line["cores_others"] for line in both)
        yield {
            "case": case,
            "costs_alike": case in FAIR,
            **ratios,
            "everything_on": everything_on,
            "cores_others_max": others,
        }


def main(
    dynamo: Annotated[Path, typer.Option(help="environment made by make_dynamo.sh")],
    case: Annotated[list[Case], typer.Option(help="may be given several times")] = FAIR,
    rounds: Rounds = 3,
    concurrency: Concurrency = [1, 16, 64],  # noqa: B006
    seconds: Annotated[float, typer.Option(help="duration for each number of clients, after a warm-up")] = 8.0,
    input_len: Annotated[int, typer.Option(help="words of the prompt, a token each; the chat template adds 30")] = 200,
    output_len: OutputLen = 64,
    model: Annotated[str, typer.Option(help="whose tokenizer")] = "smollm2-135m",
    nodelay: Annotated[
        NoDelay, typer.Option(help="connections on which the second Dynamo sets TCP_NODELAY")
    ] = NoDelay.everywhere,
    mesh_env: Annotated[list[str], typer.Option(help="NAME=VALUE for kvmesh; may be given several times")] = [],  # noqa: B006
) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # runs every `finally`
    dynamo = dynamo.expanduser().absolute()
    check_environment(dynamo)
    env, directory = name_values(mesh_env, "--mesh-env"), model_directory(model)
    facts = {"version": VERSION, "nodelay": nodelay, "mesh_env": env, "costs": COSTS, "input_len": input_len}
    print(json.dumps(facts), flush=True)
    lines: list[dict[str, Any]] = []
    for one in case:
        starts: dict[str, Start] = {KVMESH: partial(start_kvmesh, one, f"mock:{model}", env)}
        for label, where in ((STOCK, NoDelay.nowhere), (NODELAY, nodelay)):
            starts[label] = partial(start_peer, dynamo, one, directory, model, where)
        for number in range(rounds):
            for label in list(starts) if number % 2 == 0 else reversed(starts):
                measured = turn(starts[label], input_len, output_len, concurrency, seconds)
                for line in measured:
                    lines.append({"label": label, "case": one, "round": number, **line})
                    print(json.dumps(lines[-1]), flush=True)
        for clients in concurrency:
            for line in verdicts(lines, one, clients):
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    typer.run(main)
