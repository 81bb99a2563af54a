"""Wait until the mesh serves, and print its address and commands to paste."""

import asyncio
import json
import shlex
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from components.credentials import PageAccess
from components.http.fetch import fetch
from components.program import program
from components.settings import MeshSettings
from services.local.children import Child
from services.local.output import Output
from services.local.plan import Plan

REPORT_S: Final = 30.0
QUESTION: Final = "Name the capital of France."
NO_PAGES: Final[Mapping[str, str]] = MappingProxyType({})


async def until_ready(children: list[Child], model: str | None, output: Output, access: PageAccess) -> list[str]:
    """Return the models that all frontends list, once children are ready and `model`, or any, is among them."""
    reported = time.monotonic()
    while True:
        missing = [child.spec.name for child in children if not (child.ready.is_set() or child.leaving)]
        if not missing:
            pages = [child.metrics_url for child in children if child.spec.name.startswith("frontend-")]
            lists = await asyncio.gather(*(asyncio.to_thread(_models, page or "", access) for page in pages))
            common = set.intersection(*map(set, lists))
            if common and (model is None or model in common):
                return [name for name in lists[0] if name in common]
            missing = ["the model at every frontend"]
        if time.monotonic() - reported > REPORT_S:
            reported = time.monotonic()
            output.report("local", f"still waiting for {', '.join(missing)}", level="warning")
        await asyncio.sleep(0.05)


def _models(page: str, access: PageAccess) -> list[str]:
    """A frontend's metrics page needs no API key and, unlike a shared port, is its own."""
    try:
        answer = fetch(f"{page}/health", timeout_s=2.0, context=access.context(page))
        return [str(model) for model in json.loads(answer.body)["models"]]
    except (OSError, ValueError, LookupError, TypeError):
        return []


def greeting(plan: Plan, model: str, pages: Mapping[str, str] = NO_PAGES) -> list[str]:
    """Lines to print. `pages` are metrics URLs by child."""
    frontends = plan.counts["frontend"] if plan.shared else 1
    inspect = _command("inspect")
    state_dir: list[str] = []
    if plan.settings.state_dir != MeshSettings.model_fields["state_dir"].default:
        state_dir = ["--state-dir", str(plan.settings.home)]
    return [
        "",
        f"Ready: {'  '.join(plan.urls)}" + (f"  ({frontends} frontends)" if frontends > 1 else ""),
        "",
        *([f"  look:     {plan.urls[0]}/ui"] if plan.frontend.ui else []),
        f"  ask:      {_ask(plan, model)}",
        f"  workers:  {shlex.join([*inspect, 'workers', *state_dir])}",
        f"  trace:    {shlex.join([*inspect, 'trace', 'last', *state_dir])}",
        f'  by hand:  eval "$({shlex.join([*inspect, "env", *state_dir])})"  # for etcdctl, nats and more services',
        *_planner(plan, state_dir),
        *_metrics(pages),
        "",
    ]


def _ask(plan: Plan, model: str) -> str:
    body = {"model": model, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 64, "temperature": 0}
    command = ["curl", "-s", f"{plan.urls[0]}/v1/chat/completions", "-H", "Content-Type: application/json"]
    command += ["-d", json.dumps(body)]
    if plan.frontend.tls_cert:
        command.insert(1, "-k")  # curl rarely trusts a local certificate
    needs_key = plan.frontend.api_keys or plan.frontend.api_keys_file
    return shlex.join(command) + (" -H 'Authorization: Bearer <key>'" if needs_key else "")


def _planner(plan: Plan, state_dir: list[str]) -> list[str]:
    if not plan.counts["prefill"]:
        return []
    ranges = [f"--{role}={plan.counts[role]}..{plan.counts[role] + 1}" for role in ("prefill", "decode")]
    command = [*_command("planner"), "--connector", "local", *ranges, *state_dir]
    return [f"  planner:  {shlex.join(command)}"]


def _metrics(pages: Mapping[str, str]) -> list[str]:
    found = [f"{name} {url}/metrics" for name, url in pages.items()]
    lines = ["  ".join(found[at : at + 2]) for at in range(0, len(found), 2)]
    return [f"  {'metrics:' if not number else '':<10}{line}" for number, line in enumerate(lines)]


def _command(name: str) -> list[str]:
    """Start `name` as this mesh was started. Paths are relative to the working directory if possible."""
    python = Path(sys.executable)
    if program(""):
        kvmesh = python.with_name("kvmesh")
        return ["kvmesh" if shutil.which("kvmesh") == str(kvmesh) else _shown(kvmesh), name]
    return [_shown(python), "-m", f"services.{name}"]


def _shown(path: Path) -> str:
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
