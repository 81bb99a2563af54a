"""The mesh that `services.local` runs on this machine."""

import json
import os
from pathlib import Path
from typing import Any, Final, TypeVar

from components.certificates import TlsFiles
from components.settings import MeshSettings

S = TypeVar("S", bound=MeshSettings)

ADDRESSES: Final = frozenset({"etcd_url", "nats_url"})
FOUND: Final = (*ADDRESSES, "namespace", "otlp_endpoint")
PROOFS: Final = ("nats_name", "tls")
# Its servers have random ports.
ENV_OF_LOCAL_MESH: Final = 'for a running `make up`: eval "$(python -m services.inspect env)"'


def local_mesh(home: Path) -> dict[str, Any]:
    """What a running mesh wrote into its state directory; empty if none runs."""
    try:
        facts = json.loads((home / "local" / "running.json").read_text())
        os.kill(facts["pid"], 0)
    except (OSError, ValueError, LookupError, TypeError):
        return {}
    return dict(facts)


def beside_local_mesh(settings: S, user: str = "") -> S:
    """Settings completed with those of `user` in a mesh that runs here; by default the administrator's."""
    facts = local_mesh(settings.home)
    facts |= facts.get("users", {}).get(user, {})
    given = settings.model_fields_set
    wanted = FOUND if ADDRESSES & given else (*FOUND, *PROOFS)
    missing = {name: facts[name] for name in wanted if name in facts and name not in given}
    if "tls" in missing:
        missing["tls"] = TlsFiles.model_validate(missing["tls"])
    return settings.model_copy(update=missing)


def no_answer_advice(settings: MeshSettings) -> str:
    flags = "--etcd-url and --nats-url (services.local prints both)"
    if local_mesh(settings.home):
        return f"name them with {flags}"
    return f"no services.local runs with state directory {settings.home}: name its --state-dir, or {flags}"
