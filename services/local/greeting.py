"""What is printed once the mesh serves: an address, and commands that work when pasted."""

import json
import shlex
import sys
from pathlib import Path

from components.settings import MeshSettings
from services.local.plan import Plan

QUESTION = "Name the capital of France."


def greeting(plan: Plan, model: str, settings: MeshSettings) -> list[str]:
    """Lines to print. `model` is the name that the frontend lists."""
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
        "",
    ]


def _python() -> str:
    """How the reader starts the Python that has our packages: from here when it lies below, as .venv/bin/python does."""
    here, path = Path.cwd(), Path(sys.executable)
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
