"""The settings of a run's services, drawn from a seed. They print as the code that makes them."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from random import Random
from typing import Final, Literal

from services.decode.config import OnTransferFailure
from tests.faults.faults import Do, Fault

ADAPTER: Final = "tuned"
WEIGHTS, OTHER_WEIGHTS = "0123456789abcdef", "fedcba9876543210"
POOL_TOKENS: Final = 320  # a few requests fill it, so that pages are reused soon
STEP_S: Final = 0.003
SLOW_STEP_S: Final = 0.15  # waiting in a queue takes longer than computing the prompt elsewhere
EQUAL, SMALL_TO_LARGE, LARGE_TO_SMALL = (16, 16), (16, 32), (32, 16)

Adapters = Literal["none", "everywhere", "on decode alone", "other weights on prefill", "on every other decode"]


@dataclass(frozen=True, slots=True)
class Setup:
    page_sizes: tuple[int, int] = EQUAL  # of prefill, of decode
    verify_kv: bool = False
    on_transfer_failure: OnTransferFailure = "recompute"
    adapters: Adapters = "none"
    http: bool = False  # clients use it
    local_prefill_on_queue: bool = True
    prefill_step_s: float = STEP_S
    decode_step_s: float = STEP_S
    pool_tokens: int = POOL_TOKENS  # of each worker
    pipeline: bool = False  # plan steps ahead, as on a GPU
    asks: bool = False  # decode queries prefill instances, as in a large fleet, instead of following them
    seals: bool = True  # decode polls the aux slot for its seal, as with NIXL; else it is notified
    ranks: tuple[int, int] = (1, 1)  # of prefill, of decode
    kv_heads: int = 1
    window: int | None = None  # in tokens
    offloaded_tokens: int = 0  # of each worker

    def __repr__(self) -> str:
        named = ((f.name, getattr(self, f.name), f.default) for f in fields(self))
        return f"Setup({', '.join(f'{name}={value!r}' for name, value, default in named if value != default)})"

    def page_size(self, role: str) -> int:
        return self.page_sizes[role == "decode"]

    def num_ranks(self, role: str) -> int:
        return self.ranks[role == "decode"]

    def adapters_of(self, role: str, number: int) -> dict[str, str]:
        """Return the adapters of the `number`th worker of a role, with their weights."""
        match self.adapters, role:
            case ("none", _) | ("on decode alone", "prefill"):
                return {}
            case "on every other decode", "decode" if number % 2 == 0:
                return {}
            case "other weights on prefill", "prefill":
                return {ADAPTER: OTHER_WEIGHTS}
        return {ADAPTER: WEIGHTS}


PLAIN: Final = Setup()


def varied(seed: int, schedule: Sequence[Fault] = ()) -> Setup:
    """Draw a setup in which nearly all prompts are transferred and `schedule` can fire."""
    draw = Random(f"setup {seed}")
    corrupts = _corrupts(schedule)
    # A request that arrives twice may first be answered "in use": with "fail", its transfer would count as failed.
    # A prefill whose steps fail goes on to fail transfers after the faults, until it ends.
    recomputes = any(
        fault.at == "decode waiting"
        or fault.do is Do.DUPLICATE
        or (fault.do is Do.STEPS_FAIL and fault.role == "prefill")
        for fault in schedule
    )
    return Setup(
        page_sizes=draw.choice((EQUAL, EQUAL, SMALL_TO_LARGE, LARGE_TO_SMALL)),
        verify_kv=corrupts or draw.random() < 0.5,
        on_transfer_failure="recompute" if recomputes or draw.random() < 0.7 else "fail",
        adapters=draw.choice(("none", "none", "everywhere")),
        http=draw.random() < 0.4,
        pipeline=draw.random() < 0.5,
        seals=draw.random() < 0.7,
        asks=draw.random() < 0.3,
        window=draw.choice((None, None, 32, 50)),
        offloaded_tokens=draw.choice((0, 128, POOL_TOKENS)),
    )


def any_setup(seed: int, schedule: Sequence[Fault] = ()) -> Setup:
    """Draw any setup in which `schedule` does no harm."""
    draw = Random(f"wide {seed}")
    corrupts = _corrupts(schedule)
    return Setup(
        page_sizes=draw.choice((EQUAL, EQUAL, SMALL_TO_LARGE, LARGE_TO_SMALL, (64, 16), (16, 64))),
        verify_kv=corrupts or draw.random() < 0.6,
        on_transfer_failure=draw.choice(("recompute", "fail")),
        adapters=draw.choice(
            ("none", "everywhere", "on decode alone", "other weights on prefill", "on every other decode")
        ),
        http=draw.random() < 0.5,
        prefill_step_s=draw.choice((STEP_S, SLOW_STEP_S)),
        pipeline=draw.random() < 0.5,
        seals=draw.random() < 0.7,
        asks=draw.random() < 0.3,
        window=draw.choice((None, None, 32, 50)),
        offloaded_tokens=draw.choice((0, 128, POOL_TOKENS)),
    )


def _corrupts(schedule: Sequence[Fault]) -> bool:
    return any(fault.do is Do.WRITE_CORRUPT for fault in schedule)
