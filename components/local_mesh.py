"""The mesh that `services.local` runs on this machine."""

import json
import os
from pathlib import Path
from typing import Any, Final, TypeVar

from components.settings import MeshSettings

S = TypeVar("S", bound=MeshSettings)

FOUND: Final = ("etcd_url", "nats_url", "namespace", "otlp_endpoint")


def local_mesh(home: Path) -> dict[str, Any]:
    """What a running mesh wrote into its state directory; empty if none runs."""
    try:
        facts = json.loads((home / "local" / "running.json").read_text())
        os.kill(facts["pid"], 0)
    except (OSError, ValueError, LookupError, TypeError):
        return {}
    return dict(facts)


def beside_local_mesh(settings: S) -> S:
    facts = local_mesh(settings.home)
    missing: dict[str, Any] = {
        name: facts[name] for name in FOUND if name in facts and name not in settings.model_fields_set
    }
    return settings.model_copy(update=missing)


def no_answer_advice(settings: MeshSettings) -> str:
    flags = "--etcd-url and --nats-url (services.local prints both)"
    if local_mesh(settings.home):
        return f"name them with {flags}"
    return f"no services.local runs with state directory {settings.home}: name its --state-dir, or {flags}"
