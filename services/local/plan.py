"""What `services.local` runs, and the environment that each child process gets.

Children read `MESH_*` variables as everywhere. `services.local` turns its options into variables of its own first, so
children inherit them and each setting has one source.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Self, TypeVar

from pydantic import ValidationError
from pydantic_settings import SettingsError

from components.settings import MeshSettings, ModelSettings, misspelled, shown_fault
from engine.cpu_time import usable_cores
from services.bootstrap.config import BootstrapSettings
from services.decode.config import DecodeSettings
from services.frontend.config import FrontendSettings
from services.local.children import ChildSpec
from services.local.process import CannotStart
from services.prefill.config import PrefillSettings

TIERS: Final = ("bootstrap", "prefill", "decode", "frontend")  # each needs those before it
SETTINGS: Final[Mapping[str, type[MeshSettings]]] = {
    "bootstrap": BootstrapSettings,
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
    "frontend": FrontendSettings,
}

S = TypeVar("S", bound=MeshSettings)


@dataclass(frozen=True, slots=True)
class Plan:
    """One run, with the settings that its children will read."""

    counts: dict[str, int]
    settings: ModelSettings  # of all roles
    frontend: FrontendSettings
    workers: Mapping[str, PrefillSettings | DecodeSettings]  # by role; without those of which there are none
    stop_timeout_s: float = 10.0  # from SIGTERM to SIGKILL

    @classmethod
    def read(cls, counts: dict[str, int], stop_timeout_s: float = 10.0) -> Self:
        """Read the environment. Raises: CannotStart, with a line for each wrong setting."""
        faults = misspelled(os.environ, *SETTINGS.values())
        if faults:
            raise CannotStart("\n".join(faults))
        workers: dict[str, PrefillSettings | DecodeSettings] = {}
        settings = _read(ModelSettings)
        if counts.get("prefill"):
            workers["prefill"] = _read(PrefillSettings, "prefill")
        if counts.get("decode"):
            workers["decode"] = _read(DecodeSettings, "decode")
        return cls(counts, settings, _read(FrontendSettings, "frontend"), workers, stop_timeout_s)

    @property
    def names(self) -> list[str]:
        """Names of all children, tier by tier."""
        return [f"{role}-{i}" for role in TIERS for i in range(self.counts[role])]

    @property
    def shared(self) -> bool:
        """Whether several frontends listen on one port. They do, unless `frontend.share_port` is set to false."""
        given = "share_port" in self.frontend.model_fields_set
        return self.counts["frontend"] > 1 and (self.frontend.share_port or not given)

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Hosts and ports that frontends listen on."""
        count = 1 if self.shared else self.counts["frontend"]
        return [(self.frontend.host, self.frontend.port + i) for i in range(count)]

    @property
    def urls(self) -> list[str]:
        """Addresses of the frontends for clients on this machine."""
        scheme = "https" if self.frontend.tls_cert else "http"
        return [f"{scheme}://{reachable(host)}:{port}" for host, port in self.addresses]

    def threads_each(self) -> int:
        """The cores divided by the workers; `engine.cores` lends each what the others do not use.

        More threads than cores are far slower, not a little: OpenMP's threads spin at each barrier until all arrive.
        """
        workers = self.counts["prefill"] + self.counts["decode"]
        return max(1, usable_cores() // max(1, workers))

    def model_command(self) -> list[str]:
        """The command that downloads or converts the model."""
        return [sys.executable, "-m", "services.local.prepare", self.settings.model, str(self.settings.home)]

    def children(self, etcd_url: str, nats_url: str) -> list[list[ChildSpec]]:
        """The child processes, tier by tier."""
        shared = dict(os.environ)
        shared |= {
            "MESH_ETCD_URL": etcd_url,
            "MESH_NATS_URL": nats_url,
            "MESH_MODEL": self.settings.model,
            "MESH_STATE_DIR": str(self.settings.home),
            "MESH_LOG_FORMAT": "json",
            "PYTHONUNBUFFERED": "1",  # keeps lines that are not logs in order with those that are
        }
        if "MESH_ENGINE__THREADS" not in shared:
            shared["MESH_ENGINE__THREADS"] = str(self.threads_each())
            shared.setdefault("MESH_ENGINE__SHARED_CORES", str(self.settings.home / "cores"))
        drain_s = f"{0.8 * self.stop_timeout_s:g}"  # by default over before SIGKILL
        metrics_port = self.settings.metrics_port
        tiers = []
        for role in TIERS:
            tier = []
            for i in range(self.counts[role]):
                env = {f"MESH_{role.upper()}_DRAIN_TIMEOUT_S": drain_s} if role != "bootstrap" else {}
                env |= shared
                if role == "frontend":
                    host, port = self.addresses[0 if self.shared else i]
                    env |= {"MESH_FRONTEND_HOST": host, "MESH_FRONTEND_PORT": str(port)}
                    env["MESH_FRONTEND_SHARE_PORT"] = str(self.shared).lower()
                if metrics_port:  # on one machine each needs its own
                    env["MESH_METRICS_PORT"] = str(metrics_port)
                    metrics_port += 1
                tier.append(ChildSpec(f"{role}-{i}", [sys.executable, "-m", f"services.{role}"], env))
            tiers.append(tier)
        return tiers

    def one_more(self, role: str, number: int, etcd_url: str, nats_url: str) -> ChildSpec:
        """The worker `<role>-<number>`, started while the others run, with any free metrics port."""
        grown = replace(self, counts={**self.counts, role: number + 1})
        spec = grown.children(etcd_url, nats_url)[TIERS.index(role)][number]
        return replace(spec, env={**spec.env, "MESH_METRICS_PORT": "0"})


def _read(settings: type[S], role: str = "") -> S:
    try:
        return settings()
    except ValidationError as exc:
        of = f" of {role}" if role else ""
        where, colon, what = shown_fault(exc.errors()[0]).partition(":")
        raise CannotStart(f"{where}{of}{colon}{what}") from None  # its cause quotes the value, which may be a secret
    except SettingsError as exc:
        raise CannotStart(f"settings of {role}: {exc}") from None


def reachable(host: str) -> str:
    """An address to connect to for a server that listens on `host`."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)  # noqa: S104  # read, not bound
    return f"[{host}]" if ":" in host else host
