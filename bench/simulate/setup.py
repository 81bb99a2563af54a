"""Parameters of a simulated fleet."""

from dataclasses import dataclass, field

from bench.simulate.measured import Slo
from bench.simulate.routers import Delays
from bench.simulate.worker import Engine


@dataclass(frozen=True, slots=True)
class Link:
    """A prefill worker's own link. A chunk is sent while the next one is computed."""

    bytes_per_token: float = 2 * 30 * 3 * 64 * 2  # SmolLM2-135M's, bfloat16
    bytes_per_s: float = 12e9
    latency_s: float = 0.003


@dataclass(frozen=True, slots=True)
class Setup:
    """Parameters of a fleet. Without prefill workers, decode workers compute prompts."""

    decode: int
    prefill: int = 0
    engine: Engine = field(default_factory=Engine)
    prefill_engine: Engine | None = None  # None: the same as decode's
    link: Link = field(default_factory=Link)
    delays: Delays = field(default_factory=Delays)
    slo: Slo = field(default_factory=Slo)
    decode_routers: int = 1  # frontends
    prefill_routers: int = 4  # number of routers that choose prefill workers
    queries: bool = False  # whether candidates are queried for a prompt, instead of following all workers
    max_local_prefill: int = 16  # uncached tokens up to which decode computes a prompt itself
    seed: int = 0
