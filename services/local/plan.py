"""What `services.local` is asked to run, and the environment each child gets from it.

Children read `MESH_*` like anywhere else. What was given here overlays our own environment under the same names, so a
`MESH_DECODE_*` that the caller exported still wins for decode alone.
"""

import json
import os
import sys
from dataclasses import dataclass, field, replace
from typing import Final

from pydantic import ValidationError

from components.settings import MeshSettings, misspelled, shown_fault
from engine.cpu_time import usable_cores
from services.local.children import ChildSpec
from services.local.process import CannotStart

TIERS: Final = ("bootstrap", "prefill", "decode", "frontend")  # in the order in which they depend on each other


@dataclass(frozen=True, slots=True)
class Plan:
    """One run. `given` holds the settings that the command line named, as `MESH_*` variables have them."""

    counts: dict[str, int]
    host: str = "127.0.0.1"
    port: int = 8000
    share_port: bool = True  # between frontends, when there are several
    etcd_url: str | None = None  # None: start our own
    nats_url: str | None = None
    stop_timeout_s: float = 10.0
    drain_timeout_s: float | None = None  # of a worker that a planner lets go; None: as long as any stop may take
    given: dict[str, str] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Every child's name, tier by tier."""
        return [f"{role}-{i}" for role in TIERS for i in range(self.counts[role])]

    @property
    def shared(self) -> bool:
        """Whether several frontends listen on one port."""
        return self.share_port and self.counts["frontend"] > 1

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Host and port that frontends listen on: all on one, or each on its own."""
        return [(self.host, self.port + i) for i in range(1 if self.shared else self.counts["frontend"])]

    @property
    def urls(self) -> list[str]:
        """Where clients on this machine reach them."""
        scheme = "https" if self.frontend_has("tls_cert") else "http"
        return [f"{scheme}://{reachable(host)}:{port}" for host, port in self.addresses]

    def frontend(self, setting: str) -> str | None:
        """A setting of the frontends' own that was given; None: it was not."""
        name = f"frontend_{setting}"
        return self.given.get(name) or os.environ.get(f"MESH_{name.upper()}") or None

    def frontend_has(self, *settings: str) -> bool:
        """Whether frontends are given one of these settings of theirs."""
        return any(self.frontend(setting) for setting in settings)

    @property
    def adapters(self) -> dict[str, str]:
        """LoRA adapters that the command line named."""
        found: dict[str, str] = json.loads(self.given.get("engine__lora", "{}"))
        return found

    def settings(self) -> MeshSettings:
        """What all services will see. Raises: CannotStart, naming the setting that is wrong."""
        faults = misspelled(os.environ, MeshSettings)
        if faults:
            raise CannotStart("\n".join(faults))
        try:
            shared = {name: value for name, value in self.given.items() if name in MeshSettings.model_fields}
            return MeshSettings(**shared)  # type: ignore[arg-type]
        except ValidationError as exc:
            fault = exc.errors()[0]
            raise CannotStart(shown_fault(fault)) from None

    def threads_each(self) -> int:
        """The cores, divided among the workers; `engine.cores` lends each what the others do not use.

        More threads than cores is a collapse, not a loss: OpenMP's threads spin at each barrier for one that has no core.
        Measured eagerly, before cores were lent, on 2 cores with one prefill and one decode, 8 clients: 121 tokens/s with a
        thread each, 21 with two.
        """
        workers = self.counts["prefill"] + self.counts["decode"]
        return max(1, usable_cores() // max(1, workers))

    def model_command(self, settings: MeshSettings) -> list[str]:
        """The command that prepares the model."""
        return [sys.executable, "-m", "services.local.prepare", settings.model, str(settings.home)]

    def children(self, settings: MeshSettings, etcd_url: str, nats_url: str) -> list[list[ChildSpec]]:
        """The child processes, tier by tier."""
        shared = dict(os.environ) | {f"MESH_{name.upper()}": value for name, value in self.given.items()}
        shared |= {
            "MESH_ETCD_URL": etcd_url,
            "MESH_NATS_URL": nats_url,
            "MESH_MODEL": settings.model,
            "MESH_STATE_DIR": str(settings.home),
            "MESH_LOG_FORMAT": "json",
            "PYTHONUNBUFFERED": "1",  # what is not a log line shall be seen in its place among them
        }
        if "MESH_ENGINE__THREADS" not in shared:
            shared["MESH_ENGINE__THREADS"] = str(self.threads_each())
            shared.setdefault("MESH_ENGINE__SHARED_CORES", str(settings.home / "cores"))
        stop_s = 0.8 * self.stop_timeout_s  # unless the caller says otherwise: to be over before the kill
        drain_s = {"frontend": stop_s, **dict.fromkeys(("prefill", "decode"), self.drain_timeout_s or stop_s)}
        metrics_port = settings.metrics_port
        tiers = []
        for role in TIERS:
            tier = []
            for i in range(self.counts[role]):
                env = {f"MESH_{role.upper()}_DRAIN_TIMEOUT_S": f"{drain_s[role]:g}"} if role in drain_s else {}
                env |= shared
                if role == "frontend":
                    port = self.port if self.shared else self.port + i
                    env |= {"MESH_FRONTEND_HOST": self.host, "MESH_FRONTEND_PORT": str(port)}
                    env["MESH_FRONTEND_SHARE_PORT"] = str(self.shared).lower()
                if metrics_port:  # one machine: each takes the next
                    env["MESH_METRICS_PORT"] = str(metrics_port)
                    metrics_port += 1
                tier.append(ChildSpec(f"{role}-{i}", [sys.executable, "-m", f"services.{role}"], env))
            tiers.append(tier)
        return tiers

    def one_more(self, role: str, number: int, settings: MeshSettings, etcd_url: str, nats_url: str) -> ChildSpec:
        """The worker `<role>-<number>`, one that comes while the others run; its metrics port is any free one."""
        grown = replace(self, counts={**self.counts, role: number + 1})
        spec = grown.children(settings, etcd_url, nats_url)[TIERS.index(role)][number]
        return replace(spec, env={**spec.env, "MESH_METRICS_PORT": "0"})


def reachable(host: str) -> str:
    """An address to connect to for a server that listens on `host`."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)  # noqa: S104  # read, not bound
    return f"[{host}]" if ":" in host else host
