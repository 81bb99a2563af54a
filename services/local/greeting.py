"""What is printed once the mesh serves: an address, and commands that work when pasted."""

import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from components.settings import MeshSettings
from services.local.plan import Plan

QUESTION: Final = "Name the capital of France."
NO_PAGES: Final[Mapping[str, str]] = MappingProxyType({})


def greeting(plan: Plan, model: str, settings: MeshSettings, pages: Mapping[str, str] = NO_PAGES) -> list[str]:
    """Lines to print. `model` is the name that the frontend lists; `pages`: where each child has its metrics, by name."""
    urls, sharing = plan.urls, plan.counts["frontend"] if plan.shared else 1
    body = {"model": model, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 64, "temperature": 0}
    ask = [
        "curl",
        "-s",
        f"{urls[0]}/v1/chat/completions",
        "-H",
        "Content-Type: application/json",
        "-d",
        json.dumps(body),
    ]
    if plan.frontend_has("tls_cert"):
        ask.insert(1, "-k")  # a certificate for this machine is seldom one that curl knows
    key = " -H 'Authorization: Bearer <key>'" if plan.frontend_has("api_keys", "api_keys_file") else ""
    inspect = [_python(), "-m", "services.inspect"]
    where: list[str] = []  # the inspector finds this mesh by its state directory
    if settings.state_dir != MeshSettings.model_fields["state_dir"].default:
        where = ["--state-dir", str(settings.home)]
    return [
        "",
        f"Ready: {'  '.join(urls)}" + (f"  ({sharing} frontends)" if sharing > 1 else ""),
        "",
        f"  ask:      {shlex.join(ask)}{key}",
        f"  workers:  {shlex.join([*inspect, 'workers', *where])}",
        f"  trace:    {shlex.join([*inspect, 'trace', 'last', *where])}",
        f'  by hand:  eval "$({shlex.join([*inspect, "env", *where])})"  # for etcdctl, nats and further services',
        *_planner(plan, where),
        *_metrics(pages),
        "",
    ]


def _planner(plan: Plan, where: list[str]) -> list[str]:
    """How to have a planner start and stop workers, where there are some of both kinds."""
    if not plan.counts["prefill"]:
        return []
    ranges = [f"--{role}={plan.counts[role]}..{plan.counts[role] + 1}" for role in ("prefill", "decode")]
    command = [_python(), "-m", "services.planner", "--connector", "local", *ranges, *where]
    return [f"  planner:  {shlex.join(command)}"]


def _metrics(pages: Mapping[str, str]) -> list[str]:
    """The pages for Prometheus, a few to a line."""
    found = [f"{name} {url}/metrics" for name, url in pages.items()]
    lines = ["  ".join(found[at : at + 2]) for at in range(0, len(found), 2)]
    return [f"  {'metrics:' if not number else '':<10}{line}" for number, line in enumerate(lines)]


def _python() -> str:
    """How the reader starts the Python that has our packages: from here when it lies below, as .venv/bin/python does."""
    here, path = Path.cwd(), Path(sys.executable)
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
