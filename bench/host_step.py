"""The host's part of a pipelined decode step: the real core, tables and sampler, with a forward that costs nothing.

On a GPU a step cannot be shorter than this. The vocabulary is small, because sampling is the device's work. With
`on_device` the device's sampler runs without its kernel, otherwise the CPU's sampler runs.
"""

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from components.wire.layout import KvLayout, KvRegion
from components.wire.sampling import SamplingParams
from engine.attention.backend import StepAttention, StepShape
from engine.attention.step_tables import Blocks, StepLimits, StepTables, count_decodes
from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.kv.offload_memory import PageCopies
from engine.lora.adapters import Adapters
from engine.ports import EngineRequest
from engine.runner.device_model import DeviceModel
from engine.runner.torch_runner import TorchRunner
from engine.sampling import device_sampler, logprobs
from engine.sampling.device_sampler import DeviceDraw, DeviceSampler
from engine.sampling.row import Row

COPIES: Final = (
    (device_sampler, "to_device"),
    (device_sampler, "to_host"),
    (logprobs, "to_device"),
    (logprobs, "to_host"),
)


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]  # as torch ships it
    """Counts operations that are neither views nor allocations, and copies, which a CPU does not make."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0
        self._copying = False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self._copying and not func.is_view and "empty" not in func.name():
            self.count += 1
        return func(*args, **(kwargs or {}))

    @contextmanager
    def counting(self) -> Iterator[None]:
        originals = [(module, name, getattr(module, name)) for module, name in COPIES]
        for module, name, original in originals:
            setattr(module, name, self._copy(original))
        try:
            with self:
                yield
        finally:
            for module, name, original in originals:
                setattr(module, name, original)

    def _copy(self, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def copy(*args: Any) -> torch.Tensor:
            self.count += 1
            self._copying = True
            try:
                return original(*args)
            finally:
                self._copying = False

        return copy


class LaunchesOnly(DeviceSampler):
    """The host's part of the device's sampler; instead of the kernel, one operation draws token 1."""

    launches: Launches | None = None  # counts draws

    def draw(self, logits: torch.Tensor, rows: Sequence[Row]) -> DeviceDraw:
        if self.launches is None:
            return super().draw(logits, rows)
        with self.launches.counting():
            return super().draw(logits, rows)

    def _launch(self, logits: torch.Tensor, ids: torch.Tensor, masks: torch.Tensor) -> None:
        ids.fill_(1)


CPU: Final = torch.device("cpu")
VOCAB: Final = 64
PENALISED_VOCAB: Final = 2048  # the cost of penalties depends on the number of distinct tokens
CONTEXT: Final = 768
ANSWER: Final = 256
WARM: Final = 8  # steps before the first one that is counted
BLOCKS: Final = Blocks([16, 32])  # with four query heads for a key head
WAYS: Final[Mapping[str, Mapping[str, Any]]] = {
    "greedy": {"temperature": 0},
    "sampled": {},
    "top_p, top_k": {"top_p": 0.95, "top_k": 20},
    "penalties": {"temperature": 0, "repetition_penalty": 1.1, "presence_penalty": 0.5},
}


class Tables:
    """Attention that only fills its tables."""

    def __init__(self, limits: StepLimits, page_size: int, device: torch.device) -> None:
        self._tables = StepTables(limits, page_size, device, BLOCKS)

    def plan(self, shape: StepShape) -> StepAttention:
        self._tables.fill(shape, count_decodes(shape.query_lens))
        return self  # type: ignore[return-value]  # no layer asks it


class Device(TorchRunner):
    takes_cpu = False


class _NoForward:
    kind: Final = "none"

    def __init__(self, batch: int, vocab: int, device: torch.device) -> None:
        self._logits = torch.randn(batch, vocab, dtype=torch.bfloat16, device=device)

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor, step: StepAttention
    ) -> torch.Tensor:
        del token_ids, positions, step
        return self._logits[: len(keep)]


def host_core(
    batch: int, vocab: int, device: torch.device = CPU, context: int = CONTEXT, *, on_device: bool = False
) -> EngineCore:
    context += ANSWER
    layout = KvLayout(model="none", dtype="bfloat16", page_size=16, layers=1, kv_heads=1, head_dim=16)
    pages = batch * layout.pages_for(context)
    config = EngineConfig(num_pages=pages, max_running=batch, max_step_tokens=max(8192, batch + 2), pipeline="on")

    tables = Tables(StepLimits(batch, config.step_size("cpu").tokens, context), layout.page_size, device)
    model = DeviceModel(
        device, _NoForward(batch, vocab, device), tables, PageCopies(torch.zeros(1), torch.zeros(0)), Adapters()
    )
    runner = Device(model)
    if on_device:
        runner.sampler = LaunchesOnly(model.device)
    return EngineCore(
        runner=runner,
        config=config,
        region=KvRegion(0, pages, layout, "cpu"),
        max_context=context,
        vocab_size=vocab,
        eos_token_ids=frozenset({0}),
    )


def decode_steps(
    batch: int,
    steps: int,
    params: Mapping[str, Any],
    device: torch.device = CPU,
    context: int = CONTEXT,
    *,
    on_device: bool = False,
) -> list[float]:
    core = _decoding(batch, params, device, context, on_device=on_device)
    spent = []
    for _ in range(steps):
        started = time.perf_counter()
        output = core.step()
        spent.append(time.perf_counter() - started)
        assert len(output.tokens) == batch
    return spent


def launches(params: Mapping[str, Any]) -> int:
    """Return the kernels and copies of a draw on a device, with an unchanged batch."""
    core = _decoding(3, params, CPU, CONTEXT, on_device=True)
    core._runner.sampler.launches = counted = Launches()  # type: ignore[attr-defined]
    core.step()
    return counted.count


def _decoding(
    batch: int, params: Mapping[str, Any], device: torch.device, context: int, *, on_device: bool
) -> EngineCore:
    vocab = PENALISED_VOCAB if "repetition_penalty" in params else VOCAB
    core, draw = host_core(batch, vocab, device, context, on_device=on_device), random.Random(0)
    for i in range(batch):
        sampling = SamplingParams(max_tokens=ANSWER, ignore_eos=True, seed=i, **params)
        tokens = [draw.randrange(1, vocab) for _ in range(context - WARM)]
        core.submit(EngineRequest(f"r{i}", tokens, sampling))
    while len(core.step().tokens) < batch:
        pass
    for _ in range(WARM):
        core.step()
    return core


def host_steps(
    batches: Sequence[int],
    steps: int,
    device: torch.device = CPU,
    context: int = CONTEXT,
    *,
    on_device: bool = False,
) -> Iterator[tuple[int, str, list[float]]]:
    torch.set_num_threads(1)
    for batch in batches:
        for way, params in WAYS.items():
            yield batch, way, decode_steps(batch, steps, params, device, context, on_device=on_device)
