"""The cost of the mesh itself, with engines that compute nothing. Prints one JSON line per figure.

    python -m bench.mesh                        # zero-cost, disaggregated, 230 tokens in, 64 out, c = 1, 16, 64
    python -m bench.mesh --token-ms 5.7         # paced: a token every 5.7 ms
    python -m bench.mesh --prefill 0            # aggregated

It starts its own mesh. All prompts differ, so prefill computes each of them and its KV is transferred.
"""

import asyncio
import json
import os
from collections.abc import Mapping
from typing import Annotated, Final

import typer
import uvloop

from bench.closed_loop import Prompts, figures, measure
from bench.processes import free_port, mesh, model_name
from components.settings import MeshSettings

TRACES_PER_S: Final = float(MeshSettings.model_fields["traces_per_s"].default)
MOCK_SHAPE: Final = {"KV_HEADS": 1, "HEAD_DIM": 8, "DECODE_S": 0, "CONTEXT_TOKEN_S": 0, "PROMPT_TOKEN_S": 0}


def mock_env(layers: int, costs: Mapping[str, object]) -> dict[str, str]:
    """Return the environment of mock engines whose steps cost only `costs`, fields of `MockConfig` in capitals."""
    mock = {**MOCK_SHAPE, "LAYERS": layers, "STEP_S": 0, **(costs or {"SPEEDUP": "inf"})}
    env = {f"MESH_ENGINE__MOCK__{name}": str(value) for name, value in mock.items()}
    room = {"NUM_PAGES": 8192, "MAX_RUNNING": 256, "MAX_STEP_TOKENS": 8192}
    return env | {f"MESH_ENGINE__{name}": str(value) for name, value in room.items()}


def _pair(setting: str) -> tuple[str, str]:
    name, equals, value = setting.partition("=")
    if not equals or not name.startswith("MESH_"):
        raise typer.BadParameter(f"{setting!r} is not MESH_NAME=value")
    return name, value


def main(
    concurrency: Annotated[list[int], typer.Option(help="clients at once; may be given several times")] = [1, 16, 64],  # noqa: B006
    seconds: Annotated[float, typer.Option(help="duration of each level, after a warm-up of two seconds")] = 8.0,
    input_len: Annotated[
        int, typer.Option(help="words of the prompt, a token each; the chat template adds some")
    ] = 200,
    output_len: Annotated[int, typer.Option(help="tokens")] = 64,
    token_ms: Annotated[float, typer.Option(help="duration of a decode step; 0: all steps cost nothing")] = 0.0,
    model: Annotated[str, typer.Option(help="mock, or mock:<model> for that model's tokenizer")] = "mock:smollm2-135m",
    prefill: Annotated[int, typer.Option(help="prefill workers; 0: aggregated")] = 1,
    decode: Annotated[int, typer.Option(help="decode workers")] = 1,
    layers: Annotated[
        int, typer.Option(help="size of a KV page in units of 512 bytes; with 720, pages are as large as SmolLM2's")
    ] = 1,
    traces_per_s: Annotated[float, typer.Option(help="maximum number of requests traced per second")] = TRACES_PER_S,
    setting: Annotated[
        list[str], typer.Option(help="setting of the mesh, such as MESH_LOG_LEVEL=warning; may be given several times")
    ] = [],  # noqa: B006
    label: Annotated[str, typer.Option(help="label in every line")] = "kvmesh",
) -> None:
    env = mock_env(layers, {"STEP_S": token_ms / 1000} if token_ms else {})
    env |= {"MESH_TRACES_PER_S": str(traces_per_s)} | dict(_pair(text) for text in setting)
    facts = {"label": label, "prefill": prefill, "decode": decode, "token_ms": token_ms, "layers": layers}
    facts["traces_per_s"] = traces_per_s
    port = free_port()
    with mesh(model, {"prefill": prefill, "decode": decode}, env, port) as server:
        pids = {"client": [os.getpid()], **server.processes()}
        prompts = Prompts(model_name(port), input_len, output_len)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(measure(port, prompts, pids, concurrency=4, seconds=2.0))
            for clients in concurrency:
                run = runner.run(measure(port, prompts, pids, clients, seconds))
                line = figures(run, output_len, **facts, concurrency=clients, input_len=input_len)
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    typer.run(main)
