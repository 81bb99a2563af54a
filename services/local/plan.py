"""The plan of a run: which processes `services.local` starts, and the environment of each.

Its options have been set as variables of this process, so children inherit them.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import count, repeat
from secrets import token_hex
from typing import Final, Self, TypeVar

from pydantic import ValidationError
from pydantic_settings import SettingsError

from components.settings import MeshSettings, ModelSettings, misspelled, shown_fault
from components.startup import WrongSettings
from components.urls import is_loopback
from engine.config import EngineConfig
from engine.cpu.cpu_time import usable_cores
from services.bootstrap.config import BootstrapSettings
from services.decode.config import DecodeSettings
from services.frontend.config import FrontendSettings
from services.local.accounts import Reach, user_of
from services.local.children import ChildSpec
from services.observer.config import ObserverSettings
from services.prefill.config import PrefillSettings

TIERS: Final = ("bootstrap", "prefill", "decode", "frontend")  # start order: each needs those before it
SETTINGS: Final[Mapping[str, type[MeshSettings]]] = {
    "bootstrap": BootstrapSettings,
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
    "frontend": FrontendSettings,
    "observer": ObserverSettings,
}

S = TypeVar("S", bound=MeshSettings)


@dataclass(frozen=True, slots=True)
class Plan:
    counts: dict[str, int]
    settings: ModelSettings  # of all roles
    frontend: FrontendSettings
    workers: Mapping[str, PrefillSettings | DecodeSettings]  # by role, if there are any
    observer: ObserverSettings
    stop_timeout_s: float = 10.0  # from SIGTERM to SIGKILL
    instance_id: str = field(default_factory=lambda: token_hex(4))
    otlp_endpoint: str | None = None  # of the observer that this run starts, with its token
    secure: bool = False  # TLS and certificates between the processes

    @classmethod
    def read(cls, counts: dict[str, int], stop_timeout_s: float = 10.0, *, secure: bool = False) -> Self:
        """Raises: WrongSettings, with a line for each invalid setting."""
        faults = misspelled(os.environ, *SETTINGS.values())
        if faults:
            raise WrongSettings("\n".join(faults))
        workers: dict[str, PrefillSettings | DecodeSettings] = {}
        settings = _read(ModelSettings)
        if counts.get("prefill"):
            workers["prefill"] = _read(PrefillSettings, "prefill")
        if counts.get("decode"):
            workers["decode"] = _read(DecodeSettings, "decode")
        if secure and (yours := {"etcd_url", "nats_url", "tls"} & settings.model_fields_set):
            raise WrongSettings(
                f"--secure makes servers and certificates of its own: unset {', '.join(sorted(yours))}, or leave it out and "
                "set your own certificates (docs/security.md)"
            )
        if settings.instance_id is not None:
            raise WrongSettings("MESH_INSTANCE_ID names one process, and this starts several: unset it")
        frontend, observer = _read(FrontendSettings, "frontend"), _read(ObserverSettings, "observer")
        if secure and observer.tls_cert is not None:
            raise WrongSettings(
                "--secure makes a certificate for the observer: unset MESH_OBSERVER_TLS_CERT and its key"
            )
        return cls(counts, settings, frontend, workers, observer, stop_timeout_s, secure=secure)

    @property
    def names(self) -> list[str]:
        return [f"{role}-{i}" for role in TIERS for i in range(self.counts[role])]

    @property
    def shared(self) -> bool:
        """Several frontends share one port, unless `share_port` is set to false."""
        given = "share_port" in self.frontend.model_fields_set
        return self.counts["frontend"] > 1 and (self.frontend.share_port or not given)

    @property
    def addresses(self) -> list[tuple[str, int]]:
        count = 1 if self.shared else self.counts["frontend"]
        return [(self.frontend.host, self.frontend.port + i) for i in range(count)]

    @property
    def urls(self) -> list[str]:
        scheme = "https" if self.frontend.https else "http"
        return [f"{scheme}://{reachable(host)}:{port}" for host, port in self.addresses]

    @property
    def subject(self) -> str:
        """The NATS subject on which this process answers calls."""
        return f"{self.settings.namespace}.local.{self.instance_id}"

    def threads_each(self) -> int:
        """Cores for each worker: with more threads than cores, OpenMP's threads would spin at each barrier."""
        workers = self.counts["prefill"] + self.counts["decode"]
        return max(1, usable_cores() // max(1, workers))

    def memory_shares(self) -> dict[str, float]:
        """Shares of a GPU's memory for roles whose workers are not alone on it, unless the settings have one."""
        if any(name.endswith("ENGINE__GPU_MEMORY_UTILIZATION") for name in os.environ):
            return {}
        devices = {role: _indices(worker.engine) for role, worker in self.workers.items()}
        shares = {}
        for role, own in devices.items():
            together = sum(self.counts[other] for other, theirs in devices.items() if own & theirs)
            if together > 1:
                shares[role] = self.workers[role].engine.gpu_memory_utilization / together
        return shares

    def model_command(self) -> list[str]:
        return [sys.executable, "-m", "services.local.prepare", self.settings.model, str(self.settings.home)]

    def children(self, reach: Reach) -> list[list[ChildSpec]]:
        first = self.settings.metrics_port
        ports = count(first) if first else repeat(0)
        return [[self.child(role, i, reach, next(ports)) for i in range(self.counts[role])] for role in TIERS]

    def one_more(self, role: str, number: int, counts: Mapping[str, int], reach: Reach) -> ChildSpec:
        """A worker that is started later.

        Args:
            number: for its name; larger than that of any earlier worker of its role.
            counts: processes of each role that run from now on, with the new one. They share the cores and the GPUs.
        """
        return replace(self, counts=dict(counts)).child(role, number, reach, metrics_port=0)

    def child(self, role: str, number: int, reach: Reach, metrics_port: int) -> ChildSpec:
        env = {} if role == "bootstrap" else {f"MESH_{role.upper()}_DRAIN_TIMEOUT_S": self._drain_s}
        if (share := self.memory_shares().get(role)) is not None:
            env[f"MESH_{role.upper()}_ENGINE__GPU_MEMORY_UTILIZATION"] = f"{share:.3f}"
        env |= self._shared_variables() | reach(user_of(role, number)).variables()
        if role == "frontend":
            host, port = self.addresses[0 if self.shared else number]
            env |= {"MESH_FRONTEND_HOST": host, "MESH_FRONTEND_PORT": str(port)}
            env["MESH_FRONTEND_SHARE_PORT"] = str(self.shared).lower()
            if is_loopback(host):
                env.setdefault("MESH_FRONTEND_UI_CONTROL", self.subject)
        env["MESH_METRICS_PORT"] = str(metrics_port)
        return ChildSpec(f"{role}-{number}", [sys.executable, "-m", f"services.{role}"], env)

    @property
    def _drain_s(self) -> str:
        return f"{0.8 * self.stop_timeout_s:g}"  # over before SIGKILL

    def _shared_variables(self) -> dict[str, str]:
        shared = dict(os.environ)
        shared |= {
            "MESH_MODEL": self.settings.model,
            "MESH_STATE_DIR": str(self.settings.home),
            "MESH_LOG_FORMAT": "json",
            "PYTHONUNBUFFERED": "1",  # else lines that are not logs come late
        }
        if self.otlp_endpoint is not None:
            shared["MESH_OTLP_ENDPOINT"] = self.otlp_endpoint
        if "MESH_ENGINE__THREADS" not in shared:
            shared["MESH_ENGINE__THREADS"] = str(self.threads_each())
            shared.setdefault("MESH_ENGINE__SHARED_CORES", str(self.settings.home / "cores"))
        return shared


def _indices(engine: EngineConfig) -> set[int]:
    """Indices of the GPUs that a worker takes, if there are any."""
    name, _, index = ("cuda:0" if engine.device == "auto" else engine.device).partition(":")
    first = int(index) if index.isdigit() else 0
    return set(range(first, first + engine.tensor_parallel)) if name == "cuda" else set()


def _read(settings: type[S], role: str = "") -> S:
    try:
        return settings()
    except ValidationError as exc:
        of = f" of {role}" if role else ""
        where, colon, what = shown_fault(exc.errors()[0], settings).partition(":")
        raise WrongSettings(f"{where}{of}{colon}{what}") from None  # the cause quotes the value, which may be a secret
    except SettingsError as exc:
        raise WrongSettings(f"settings of {role}: {exc}") from None


def reachable(host: str) -> str:
    """An address of a server that listens on `host`."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)  # noqa: S104  # read, not bound
    return f"[{host}]" if ":" in host else host
