"""`python -m services.local`: the whole mesh on one machine, with real etcd and NATS, until Ctrl-C."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from components.routing.policies import check_policy
from components.settings import ABOUT_POLICIES
from services.local.devices import device_settings
from services.local.plan import Plan
from services.local.supervisor import run_mesh

Count = Annotated[int, typer.Option(min=1)]
HELP_ALL = "--help-all"
SELDOM = HELP_ALL not in sys.argv  # whether options that are seldom needed stay out of the help

app = typer.Typer(rich_markup_mode=None, add_completion=False)  # rich cuts the names of variables


def _policy(given: str | None) -> str | None:
    """Refused here rather than by each service that starts."""
    try:
        return None if given is None else check_policy(given)
    except ValueError as exc:
        raise typer.BadParameter(str(exc)) from exc


@app.command()
def main(
    *,
    prefill: Annotated[int, typer.Option(min=0, help="prefill workers; 0: decode computes prompts itself")] = 1,
    decode: Annotated[int, typer.Option(min=1, help="decode workers")] = 1,
    frontend: Annotated[int, typer.Option(min=1, help="HTTP frontends, all behind the one port")] = 1,
    bootstrap: Annotated[
        int, typer.Option(min=0, hidden=SELDOM, help="bootstrap replicas; 0 only without prefill workers")
    ] = 1,
    model: Annotated[
        str | None,
        typer.Option(
            envvar="MESH_MODEL",
            help="smollm2-135m (default), a local directory, a hub id, a GGUF file, a config.json, or mock",
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(envvar="MESH_FRONTEND_HOST", help="address that frontends listen on")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(envvar="MESH_FRONTEND_PORT", min=1, max=65535, help="that frontends listen on")
    ] = 8000,
    share_port: Annotated[
        bool,
        typer.Option(
            envvar="MESH_FRONTEND_SHARE_PORT",
            hidden=SELDOM,
            help="several frontends behind one port; with --no-share-port further ones take the next ports",
        ),
    ] = True,
    api_keys_file: Annotated[
        Path | None,
        typer.Option(envvar="MESH_FRONTEND_API_KEYS_FILE", help="TOML: keys that clients must bring; docs/openai.md"),
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(envvar="MESH_FRONTEND_TLS_CERT", help="PEM file of a certificate: serve https")
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(envvar="MESH_FRONTEND_TLS_KEY", help="PEM file of its private key")
    ] = None,
    etcd_url: Annotated[
        str | None, typer.Option(envvar="MESH_ETCD_URL", help="an etcd that runs; default: start one")
    ] = None,
    nats_url: Annotated[
        str | None, typer.Option(envvar="MESH_NATS_URL", help="a NATS that runs; default: start one")
    ] = None,
    state_dir: Annotated[
        Path | None,
        typer.Option(envvar="MESH_STATE_DIR", help="converted models, traces, the servers' data [~/.cache/kvmesh]"),
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DEVICE",
            help="of the workers: cpu, cuda, cuda:1, or one for each role: prefill=cuda:0,decode=cuda:1; may be repeated "
            "[the first CUDA device, else cpu]",
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(envvar="MESH_ENGINE__DTYPE", help="of weights and KV, such as bfloat16")
    ] = None,
    kv_memory_gb: Annotated[
        float | None, typer.Option(envvar="MESH_ENGINE__KV_MEMORY_GB", help="memory for KV pages, each worker")
    ] = None,
    lora: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=DIRECTORY", help="a LoRA adapter, asked for as model NAME; may be repeated"),
    ] = None,
    kv_transfer: Annotated[
        str | None,
        typer.Option(
            envvar="MESH_KV_TRANSFER",
            hidden=SELDOM,
            help="what moves KV: nixl (default), nixl/<PLUGIN>, mooncake, fake",
        ),
    ] = None,
    prefill_policy: Annotated[
        str | None,
        typer.Option(
            envvar="MESH_DECODE_PREFILL_POLICY",
            metavar="POLICY",
            callback=_policy,
            help=f"how decode chooses a prefill worker: {ABOUT_POLICIES} [kv_aware]",
        ),
    ] = None,
    decode_policy: Annotated[
        str | None,
        typer.Option(
            envvar="MESH_FRONTEND_DECODE_POLICY",
            metavar="POLICY",
            callback=_policy,
            help="how frontends choose a decode worker: likewise [least_load]",
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            envvar="MESH_ENGINE__THREADS",
            hidden=SELDOM,
            min=1,
            help="CPU threads of each worker; default: the cores divided among them, idle ones lent to who has work",
        ),
    ] = None,
    namespace: Annotated[
        str | None,
        typer.Option(envvar="MESH_NAMESPACE", hidden=SELDOM, help="first part of etcd keys and NATS subjects [kvmesh]"),
    ] = None,
    otlp_endpoint: Annotated[
        str | None, typer.Option(envvar="MESH_OTLP_ENDPOINT", hidden=SELDOM, help="OTLP/HTTP collector for traces")
    ] = None,
    log_level: Annotated[
        str | None, typer.Option(envvar="MESH_LOG_LEVEL", help="debug, info, warning or error")
    ] = None,
    stop_timeout: Annotated[
        float, typer.Option(min=0.1, hidden=SELDOM, help="seconds a process has to stop before it is killed")
    ] = 10.0,
    drain_timeout: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            hidden=SELDOM,
            help="seconds that a worker which a planner lets go has to finish its requests; default: four fifths of "
            "--stop-timeout. What it has not finished then goes on elsewhere",
        ),
    ] = None,
) -> None:
    """Run etcd, NATS, bootstrap, prefill, decode and frontend on this machine until Ctrl-C.

    Each service also reads its own environment variables: MESH_X for all of them, MESH_DECODE_X for decode alone
    (python -m services.decode --help lists them). --help-all lists more options.
    """
    os.umask(0o077)  # logs, traces and passwords of this run are for its user alone
    given = {
        "model": model,
        "state_dir": state_dir,
        "namespace": namespace,
        "kv_transfer": kv_transfer,
        "decode_prefill_policy": prefill_policy,
        "frontend_decode_policy": decode_policy,
        "frontend_api_keys_file": api_keys_file,
        "frontend_tls_cert": tls_cert,
        "frontend_tls_key": tls_key,
        "otlp_endpoint": otlp_endpoint,
        "log_level": log_level,
        "engine__dtype": dtype,
        "engine__lora": _adapters(lora),
        "engine__kv_memory_gb": kv_memory_gb,
        "engine__threads": threads,
        **_devices(device),
    }
    plan = Plan(
        counts={"bootstrap": bootstrap, "prefill": prefill, "decode": decode, "frontend": frontend},
        host=host,
        port=port,
        share_port=share_port,
        etcd_url=etcd_url,
        nats_url=nats_url,
        stop_timeout_s=stop_timeout,
        drain_timeout_s=drain_timeout,
        given={name: str(value) for name, value in given.items() if value is not None},
    )
    sys.exit(asyncio.run(run_mesh(plan)))


def _devices(given: list[str] | None) -> dict[str, str]:
    try:
        return device_settings(given or [])
    except ValueError as exc:
        raise typer.BadParameter(str(exc), param_hint="--device") from exc


def _adapters(given: list[str] | None) -> str | None:
    """As `MESH_ENGINE__LORA` has them."""
    if not given:
        return None
    pairs = [item.partition("=") for item in given]
    if not all(name and directory for name, _, directory in pairs):
        raise typer.BadParameter(f"{' '.join(given)}: give NAME=DIRECTORY", param_hint="--lora")
    return json.dumps({name: directory for name, _, directory in pairs})


if __name__ == "__main__":
    app(["--help"] if HELP_ALL in sys.argv else None, prog_name="python -m services.local")
