"""Compares kvmesh with vLLM's CPU build, each with the same processes. Prints one JSON line per figure.

    python -m bench.peers.vllm --vllm DIRECTORY/bin/vllm [--mode disaggregated]

`bench/peers/make_vllm_cpu.sh` makes the DIRECTORY. vLLM's processes are stopped (SIGSTOP) while kvmesh is measured
(`bench/turns.py`). Disaggregated, the client acts as vLLM's proxy, and its request to prefill is part of the time to
first token. `untangle` then helps vLLM on few cores; `--vllm-as-shipped` disables it.
"""

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from enum import StrEnum, auto
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import httpx
import typer

from bench.load.client import Body
from bench.peers.arguments import model_directory, name_values
from bench.processes import CPU_FIELDS, TICK_S, Server, free_port, model_name, serving
from bench.turns import (
    Concurrency,
    Contestant,
    InputLen,
    Model,
    OutputLen,
    RangeRatio,
    Requests,
    Rounds,
    Target,
    Work,
    by_turns,
    start_kvmesh,
)

VERSION: Final = "0.32.0"
KVMESH, VLLM = "kvmesh", "vllm-cpu"
START_S: Final = 600.0  # the first start compiles; later ones take a minute
NIXL_ENV: Final = {"UCX_USE_MT_MUTEX": "y"}  # otherwise a spin lock waits for its holder's time slice
CONNECTOR: Final = {"num_threads": 0}  # the default is four more, for network cards
NO_REMOTE: Final = {"remote_engine_id": None, "remote_block_ids": None, "remote_host": None, "remote_port": None}


class Mode(StrEnum):
    aggregated = auto()  # one engine, all cores
    disaggregated = auto()  # prefill and decode with half the cores each, and NIXL between them


MESHES: Final = {
    Mode.aggregated: {"prefill": 0, "decode": 1},
    Mode.disaggregated: {"prefill": 1, "decode": 1},
}
TARGETS: Final = {
    Mode.aggregated: (
        Target("output_tok_s", 1.1, clients=[1]),
        Target("output_tok_s", 1.5, clients=[8]),
        Target("ttft_ms_p50", 1.0),
        Target("itl_ms_p99", 1.0, clients=[8]),
    ),
    Mode.disaggregated: (Target("output_tok_s", 1.5), Target("ttft_ms_p50", 0.6)),
}


@contextmanager
def start_vllm(
    vllm: Path,
    model_dir: str,
    name: str,
    mode: Mode,
    env: Mapping[str, str],
    connector: Mapping[str, Any],
    *,
    dtype: str = "bfloat16",
    options: Sequence[str] = (),
    as_shipped: bool = False,
) -> Iterator[Contestant]:
    """Start one `vllm serve` with `options`, or two with NIXL between them.

    `as_shipped`: without NIXL_ENV, CONNECTOR and `untangle`.
    """
    cores = [str(core) for core in sorted(os.sched_getaffinity(0))]
    half = len(cores) // 2
    shares = [cores] if mode is Mode.aggregated else [cores[:half], cores[half:]]
    ports = [free_port() for _ in shares]
    servers: list[Server] = []
    connects, behind = mode is Mode.disaggregated, 0
    helped = connects and not as_shipped
    if helped:
        env, connector = NIXL_ENV | dict(env), CONNECTOR | dict(connector)
    with tempfile.TemporaryDirectory() as home, ExitStack() as stack:
        for share, port in zip(shares, ports, strict=True):
            settings = {**_vllm_env(vllm, home, share), **env}
            command = [str(vllm), "serve", model_dir, "--served-model-name", name, "--port", str(port)]
            command += ["--host", "127.0.0.1", "--dtype", dtype, "--max-model-len", "4096", *options]
            if connects:
                settings["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
                transfer: dict[str, Any] = {
                    "kv_connector": "NixlConnector",
                    "kv_role": "kv_both",
                    "kv_buffer_device": "cpu",
                }
                transfer["kv_connector_extra_config"] = connector
                command += ["--kv-transfer-config", json.dumps(transfer)]
            ready, log = "Application startup complete", Path(home) / f"{port}.log"
            serve = serving(command, settings, log, ready=ready, timeout_s=START_S)
            servers.append(stack.enter_context(serve))
            if helped:
                behind += len(untangle(servers[-1], {int(core) for core in share}))
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        prepare = PrefillFirst(urls[0]) if connects else None
        facts: dict[str, Any] = {"version": VERSION, "cores": shares, "env": dict(env), "connector": dict(connector)}
        facts |= {"dtype": dtype, "options": list(options), "threads_put_behind": behind}
        contestant = Contestant(VLLM, urls[-1], servers, facts, prepare, stopped_when_idle=True)
        contestant.stop()
        yield contestant


def _vllm_env(vllm: Path, home: str, cores: Sequence[str]) -> dict[str, str]:
    environment = vllm.parent.parent
    return {
        "PATH": f"{vllm.parent}:{os.environ['PATH']}",
        "TMPDIR": home,  # sockets and temporary files
        "VLLM_CACHE_ROOT": str(environment / "cache"),  # compiled once
        "VLLM_CONFIG_ROOT": str(environment / "config"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(cores),  # the default leaves one core unused
    }


class PrefillFirst:
    """Acts as vLLM's proxy: sends the prompt to prefill, then the location of its KV to decode."""

    def __init__(self, prefill_url: str) -> None:
        self._url = f"{prefill_url}/v1/completions"

    async def __call__(self, client: httpx.AsyncClient, body: Body) -> Body:
        ask = {name: value for name, value in body.items() if name != "stream_options"}
        wanted = {"do_remote_decode": True, "do_remote_prefill": False, **NO_REMOTE}
        answer = await client.post(
            self._url, json=ask | {"max_tokens": 1, "stream": False, "kv_transfer_params": wanted}
        )
        answer.raise_for_status()
        return body | {"kv_transfer_params": answer.json()["kv_transfer_params"]}


def check_environment(vllm: Path) -> None:
    """Exit with instructions unless `vllm` has the expected version."""
    make = "make its environment with: sh bench/peers/make_vllm_cpu.sh DIRECTORY, and set --vllm DIRECTORY/bin/vllm"
    if not vllm.is_file():
        sys.exit(f"{vllm} does not exist; {make}")
    packages = list(vllm.parent.parent.glob("lib/python*/site-packages"))
    for needed in (f"vllm_cpu-{VERSION}.dist-info", f"vllm-{VERSION}+cpu.dist-info", "nixl"):
        if not any((directory / needed).exists() for directory in packages):
            sys.exit(f"{vllm} has no {needed} beside it; {make}")


WORKER: Final = "VLLM::Worker"
WATCH_S: Final = 1.0
SPINS: Final = 0.1  # share of a core that an idle thread must use to count as spinning
LAST: Final = 19  # nice value; such a thread gets 1.5 % of a core next to a computing one


def untangle(server: Server, cores: Collection[int]) -> list[int]:
    """Bind an idle server's workers to `cores`. Return the threads whose priority was lowered.

    NixlConnector pins each worker's main thread to the machine's last core, and NIXL's progress thread spins on the core of
    its worker.
    """
    spinning = []
    for pid in server.processes()[WORKER]:
        for thread in _cpu_s(pid):
            os.sched_setaffinity(thread, cores)
        spinning += spinning_threads(pid)
    for thread in spinning:
        os.setpriority(os.PRIO_PROCESS, thread, LAST)
    return spinning


def spinning_threads(pid: int) -> list[int]:
    """Return the threads of the idle process `pid`, except the main one, that use a core."""
    before = _cpu_s(pid)
    time.sleep(WATCH_S)
    used = {thread: spent_s - before.get(thread, 0.0) for thread, spent_s in _cpu_s(pid).items()}
    return [thread for thread, spent_s in used.items() if thread != pid and spent_s > SPINS * WATCH_S]


def _cpu_s(pid: int) -> dict[int, float]:
    threads = Path(f"/proc/{pid}/task").iterdir()
    stats = {int(thread.name): (thread / "stat").read_text().rpartition(")")[2].split() for thread in threads}
    return {thread: sum(map(int, stat[CPU_FIELDS])) * TICK_S for thread, stat in stats.items()}


def main(
    vllm: Annotated[Path, typer.Option(help="executable in the environment made by make_vllm_cpu.sh")],
    mode: Annotated[
        Mode, typer.Option(help="one engine on all cores, or prefill and decode with half of them each")
    ] = Mode.aggregated,
    rounds: Rounds = 3,
    concurrency: Concurrency = [1, 8],  # noqa: B006
    requests: Requests = 8,
    input_len: InputLen = 256,
    output_len: OutputLen = 64,
    range_ratio: RangeRatio = 1.0,
    model: Model = "smollm2-135m",
    kvmesh_prefill: Annotated[
        int | None,
        typer.Option(min=0, help="prefill workers of kvmesh; 0: one engine, which also computes prompts"),
    ] = None,
    mesh_env: Annotated[list[str], typer.Option(help="NAME=VALUE for kvmesh; may be given several times")] = [],  # noqa: B006
    vllm_env: Annotated[list[str], typer.Option(help="NAME=VALUE for vLLM, such as LD_PRELOAD=…")] = [],  # noqa: B006
    vllm_dtype: Annotated[
        Literal["bfloat16", "float32"],
        typer.Option(help="dtype of vLLM, which has no fast bfloat16 for processors without AVX-512"),
    ] = "bfloat16",
    vllm_option: Annotated[
        list[str],
        typer.Option(help="option of `vllm serve`, such as --speculative-config=JSON; may be given several times"),
    ] = [],  # noqa: B006
    vllm_connector: Annotated[
        str, typer.Option(help="kv_connector_extra_config of vLLM's NixlConnector, as JSON")
    ] = "{}",
    vllm_as_shipped: Annotated[
        bool,
        typer.Option(
            "--vllm-as-shipped", help="run vLLM's disaggregation without the settings that it needs on few cores"
        ),
    ] = False,
) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # runs every `finally`
    vllm = vllm.expanduser().absolute()
    check_environment(vllm)
    connector = json.loads(vllm_connector)
    if connector and mode is Mode.aggregated:
        sys.exit("--vllm-connector: one engine on all cores has no connector")
    if vllm_as_shipped and mode is Mode.aggregated:
        sys.exit("--vllm-as-shipped: one engine on all cores is always as shipped")
    environments = name_values(mesh_env, "--mesh-env"), name_values(vllm_env, "--vllm-env")
    model_dir = model_directory(model)
    mesh = MESHES[mode] | ({} if kvmesh_prefill is None else {"prefill": kvmesh_prefill})
    with ExitStack() as stack:
        ours = stack.enter_context(start_kvmesh(KVMESH, model, mesh, environments[0]))
        name = model_name(int(ours.url.rpartition(":")[2]))
        vllm_pair = start_vllm(
            vllm,
            model_dir,
            name,
            mode,
            environments[1],
            connector,
            dtype=vllm_dtype,
            options=vllm_option,
            as_shipped=vllm_as_shipped,
        )
        theirs = stack.enter_context(vllm_pair)
        work = Work(rounds, concurrency, requests, input_len, output_len, range_ratio)
        by_turns((ours, theirs), name, work, TARGETS[mode], mode=mode)


if __name__ == "__main__":
    typer.run(main)
