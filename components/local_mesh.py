"""The mesh that `services.local` runs on this machine."""

import json
from pathlib import Path
from typing import Any, Final, TypeVar

from components.certificates import TlsFiles
from components.settings import MeshSettings
from components.urls import without_password

S = TypeVar("S", bound=MeshSettings)

ADDRESSES: Final = frozenset({"etcd_url", "nats_url"})
FOUND: Final = (*ADDRESSES, "namespace", "otlp_endpoint")
PROOFS: Final = ("nats_name", "tls")
# Its servers have random ports.
ENV_OF_LOCAL_MESH: Final = 'for a running `make up`: eval "$(python -m services.inspect env)"'


def started_at(pid: int) -> str:
    """When process `pid` started, which distinguishes it from later ones with its id. Raises: OSError."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return f"{boot} {ticks}"


def local_mesh(home: Path) -> dict[str, Any]:
    """What a running mesh wrote into its state directory; else empty."""
    try:
        facts = json.loads((home / "local" / "running.json").read_text())
        started = started_at(facts["pid"])
        if facts.get("started", started) != started:
            return {}
    except (OSError, ValueError, LookupError, TypeError):
        return {}
    return dict(facts)


def beside_local_mesh(settings: S, user: str = "") -> S:
    """Settings completed with those of `user`, by default the administrator's, in a mesh that runs here."""
    facts = local_mesh(settings.home)
    facts |= facts.get("users", {}).get(user, {})
    given = settings.model_fields_set
    wanted = FOUND if ADDRESSES & given else (*FOUND, *PROOFS)
    missing = {name: facts[name] for name in wanted if name in facts and name not in given}
    if "tls" in missing:
        missing["tls"] = TlsFiles.model_validate(missing["tls"])
    return settings.model_copy(update=missing)


def no_answer_advice(settings: MeshSettings) -> str:
    flags = "--etcd-url and --nats-url (`inspect env` prints both, with passwords)"
    if mesh := local_mesh(settings.home):
        if all(without_password(getattr(settings, url)) == without_password(str(mesh.get(url))) for url in ADDRESSES):
            return f"services.local (pid {mesh['pid']}) runs it; its logs are in {settings.home / 'local'}"
        return f"name them with {flags}"
    return f"no services.local runs with state directory {settings.home}: name its --state-dir, or {flags}"
