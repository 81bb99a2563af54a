"""What a simulated fleet is, before anything happens to it."""

from dataclasses import dataclass, field

from bench.simulate.measured import Slo
from bench.simulate.routers import News
from bench.simulate.worker import Engine


@dataclass(frozen=True, slots=True)
class Link:
    """How KV moves. A prefill worker's link is its own; chunks leave while the next one computes."""

    bytes_per_token: float = 2 * 30 * 3 * 64 * 2  # SmolLM2-135M's, bfloat16
    bytes_per_s: float = 12e9
    latency_s: float = 0.003


@dataclass(frozen=True, slots=True)
class Setup:
    """A fleet before anything happens to it. Without prefill workers, decode workers compute prompts."""

    decode: int
    prefill: int = 0
    engine: Engine = field(default_factory=Engine)
    prefill_engine: Engine | None = None  # None: as the others
    link: Link = field(default_factory=Link)
    news: News = field(default_factory=News)
    slo: Slo = field(default_factory=Slo)
    decode_routers: int = 1  # frontends
    prefill_routers: int = 4  # decode workers that choose; more of them know less of each other
    asks: bool = False  # each of these asks candidates about a prompt, instead of following every prefill worker
    max_local_prefill: int = 16  # tokens left after its own prefix hit that decode computes itself
    seed: int = 0
