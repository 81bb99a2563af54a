"""The forward on a CUDA device: compiled at run time, with CUDA graphs for decodes."""

import logging
import operator
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from math import inf
from time import monotonic
from typing import Any, Final, Protocol, cast

import torch
from torch import Tensor

from engine.attention.backend import AttentionBackend, Scoring, StepAttention, StepShape
from engine.attention.opaque import OpaqueAttention, attending
from engine.attention.step_tables import SHORT_CHUNK, SPAN
from engine.compilation.forward import EagerForward, Forward, padded
from engine.compilation.graphs import CaptureFailed, Compute, CudaRecorder, DecodeGraphs, Recordable, Recorder
from engine.config import EngineConfig
from engine.device.c_compiler import find_c_compiler
from engine.kernels.operators import define_operator
from engine.kernels.shared_linear import merge_products, share_linears
from engine.lora.adapters import any_adapted
from engine.model.load import LoadedModel
from engine.model.progress import Progress
from engine.sharding.group import of_all_ranks

log = logging.getLogger(__name__)

TASK: Final = "Compiling the model"
RECORD_S: Final = 60.0  # limit for recording all graphs, without compiling
FEW: Final = 8  # minimum of tokens in the compiled example
TYPICAL: Final = 2048  # tokens for which inductor chooses and times its kernels
ROTATIONS: Final = ("cos", "sin")  # methods that compute rotary embeddings

Compiler = Callable[[torch.nn.Module], Compute]
MakeRecorder = Callable[[], Recorder]  # each recorder has its own memory pool


class _Step(StepAttention, Protocol):
    @property
    def replayable(self) -> bool:
        """True if a recorded graph computes the same as this step."""


class NoAttention:
    """For compiling a model, without pages."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, *, sinks: Tensor | None = None
    ) -> Tensor:
        return torch.zeros_like(query).transpose(1, 2)


class Traced(torch.nn.Module):
    """The forward for torch.compile, with attention as an operator."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self._eager = EagerForward(module)
        self.module = module  # registers the parameters

    def forward(self, token_ids: Tensor, positions: Tensor, keep: Tensor) -> Tensor:
        return self._eager(token_ids, positions, keep, OpaqueAttention())


class DeviceForward:
    """A forward that is eager until a thread has compiled the model. Construction replaces linear layers."""

    def __init__(
        self,
        loaded: LoadedModel,
        attention: AttentionBackend,
        recorder: MakeRecorder | None,
        compiler: Compiler,
        typical: int = FEW,
    ) -> None:
        """`attention` must be `Recordable` if `recorder` is given. `typical`: tokens in the compiled example."""
        self.kind: str = EagerForward.kind
        self._eager = EagerForward(loaded.module)
        self._traced = Traced(loaded.module)
        self._attention: AttentionBackend | None = attention
        self._recorder = recorder
        self._compiler = compiler
        self._typical = typical
        self._device = loaded.device
        self._layout = loaded.layout
        self._made: Compute | None = None  # set by the compiling thread
        self._compute: Compute | None = None
        self._graphs: DecodeGraphs | None = None
        self._thread = threading.Thread(target=self._compile, name="compile", daemon=True)
        share_linears(loaded.module)
        torch.cuda.empty_cache()  # frees the memory of the old weights, which is too fragmented for reuse

    @torch.inference_mode()
    def start(self, timeout_s: float, progress: Progress) -> None:
        progress(TASK, 0, 1)
        self._thread.start()
        self._thread.join(timeout_s)
        progress(TASK, 1, 1)
        self._adopt()
        if self._compute is not None and timeout_s > 0:
            self._warm_prompts()
        elif self._recorder is not None:
            log.warning(
                "decodes run without CUDA graphs, because the model is not compiled yet",
                extra={"waited_s": round(timeout_s)},
            )
            self._recorder = None

    @torch.inference_mode()
    def record(self, attention: AttentionBackend, progress: Progress, most: int | None = None) -> tuple[int, int]:
        """Record decode graphs over `attention`'s pages, or further ones. Graphs over other pages are freed.

        Returns: the number of graphs, and the number without `most` and the time limit.
        """
        if self._compute is None or self._recorder is None:
            return 0, 0
        alone = self._layout.shards == 1
        if self._graphs is None or attention is not self._attention:
            self.forget_graphs()
            self._attention = attention
            record = self._recorder()
            if not alone:
                record = _on_all_ranks(record, self._device)
            self._graphs = DecodeGraphs(self._compute, cast("Recordable", attention), record)
        # no limit with several ranks: they must record the same sizes, but their clocks differ
        deadline = monotonic() + RECORD_S if alone else inf
        try:
            recorded, wanted = self._graphs.record_all(deadline, progress, most), self._graphs.num_sizes
        except CaptureFailed as exc:
            log.warning("decodes run without CUDA graphs: recording them failed", extra={"reason": str(exc)})
            log.debug("recording failed", exc_info=True)
            self.forget_graphs()
            self._recorder = None  # after a failure nothing may be recorded
            return 0, 0
        asked = wanted if most is None else min(most, wanted)
        if recorded < asked:
            log.warning(
                "decodes run in larger CUDA graphs than necessary, because recording took too long",
                extra={"graphs": recorded, "wanted": asked, "limit_s": RECORD_S},
            )
        return recorded, wanted

    def forget_graphs(self) -> None:
        """Free the graphs and the pages that they read."""
        self._graphs = self._attention = None

    def __call__(self, token_ids: Tensor, positions: Tensor, keep: Tensor, step: StepAttention) -> Tensor:
        self._adopt()
        if self._compute is None:
            return self._eager(token_ids, positions, keep, step)
        graphs = None if any_adapted() else self._graphs  # graphs were recorded without adapters
        if graphs is not None and len(keep) == len(token_ids) and cast("_Step", step).replayable:
            self.kind = "graph"
            return graphs(token_ids, positions)
        self.kind = "compiled"
        with attending(step, len(token_ids)):
            logits = self._compute(padded(token_ids), padded(positions), padded(keep))
        return logits[: len(keep)]

    def _adopt(self) -> None:
        if self._compute is None and self._made is not None:
            self._compute = self._made

    @torch.inference_mode()
    def _compile(self) -> None:
        try:
            with _current(self._device):
                self._made = self._compiled()
            log.info("the compiled model is now used")
        except Exception as exc:  # a compiler may raise anything, and eager always works
            log.warning("the model runs without torch.compile, because compiling it failed", extra={"reason": str(exc)})
            log.debug("compiling failed", exc_info=True)
            if self._recorder is not None:  # graphs can also be recorded of eager modules
                self._made = self._traced

    def _compiled(self) -> Compute:
        tokens = max(FEW, self._typical)
        token_ids = torch.zeros(tokens, dtype=torch.int64, device=self._device)
        # another size, because equal sizes would become one dimension
        keep = torch.arange(tokens // 4, device=self._device)
        example = token_ids, token_ids.clone(), keep
        for tensor in example:
            torch._dynamo.mark_dynamic(tensor, 0)
        compiled = self._compiler(self._traced)
        with attending(NoAttention(), tokens):
            compiled(*example)
        return compiled

    def _warm_prompts(self) -> None:
        """Compile kernels of short and longer chunks, with one and with several spans, on page 0."""
        assert self._attention is not None
        longest = self._attention.limits.context if isinstance(self._attention, Recordable) else 0
        for length in (SHORT_CHUNK, SHORT_CHUNK + 1):
            ids = torch.zeros(length, dtype=torch.int64, device=self._device)
            positions = torch.arange(length, device=self._device)
            # enough for several spans: a chunk of n blocks has spans n times as long, and no more blocks than tokens
            for context in {length, max(length, min(length + length * SPAN, longest))}:
                table = [0] * self._layout.pages_for(context)
                self(ids, positions, positions[-1:], self._attention.plan(StepShape([length], [context], [table])))


def choose_device_forward(
    loaded: LoadedModel, config: EngineConfig, attention: AttentionBackend, progress: Progress
) -> Forward:
    """Wait for the compiler even with `compile=auto`, because compiling while the GPU serves would slow steps for minutes."""
    reason = why_eager(config)
    if reason is not None:
        log.info("the model runs eagerly", extra={"reason": reason})
        return EagerForward(loaded.module)
    recorder = CudaRecorder if isinstance(attention, Recordable) else None
    typical = min(TYPICAL, config.step_size(str(loaded.device)).tokens)
    forward = DeviceForward(loaded, attention, recorder, torch_compile, typical)
    forward.start(config.compile_timeout_s, progress)
    return forward


def _on_all_ranks(record: Recorder, device: torch.device) -> Recorder:
    """Fail on all ranks if one fails, because ranks that replay different graphs would hang in a sum."""

    def record_on_all(work: Callable[[], None]) -> Callable[[], None]:
        replay, failure = work, None
        try:
            replay = record(work)
        except CaptureFailed as exc:
            failure = exc
        if [0] in of_all_ranks([int(failure is None)], device):
            raise failure or CaptureFailed("another rank failed")
        return replay

    return record_on_all


def why_eager(config: EngineConfig) -> str | None:
    if config.compile == "off":
        return "compile is off"
    if find_spec("triton") is None:
        return "the package triton is not installed"
    if find_c_compiler() is None:
        return "there is no C compiler with Python.h: install gcc and python3-dev, or set CC"
    return None


def torch_compile(module: torch.nn.Module) -> Compute:
    def merged(traced: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        merge_products(traced.graph)
        keep_rotations(traced.graph)
        traced.recompile()
        return torch._dynamo.lookup_backend("inductor")(traced, inputs)

    compiled: Compute = torch.compile(module, fullgraph=True, backend=merged)
    return compiled


def _current(device: torch.device) -> AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def keep_rotations(graph: torch.fx.Graph) -> int:
    """Compute the sines and cosines in `graph`, as torch.compile traced it, once per step.

    On a GPU, inductor would inline them into a kernel of each layer, which would compute them again for every head.
    Returns: their number.
    """
    found = [node for node in graph.nodes if node.op == "call_method" and node.target in ROTATIONS]
    for node in found:
        ready = _scaled_and_cast(node)
        with graph.inserting_after(ready):
            kept = graph.call_function(torch.ops.kvmesh.keep.default, (ready,))
        for user in list(ready.users):
            if user is not kept:
                user.replace_input_with(ready, kept)
    return len(found)


def _scaled_and_cast(node: torch.fx.Node) -> torch.fx.Node:
    """Return the node after the factors and the cast that all users share."""
    while len(node.users) == 1:
        (user,) = node.users
        is_factor = user.target is operator.mul and not isinstance(user.args[1], torch.fx.Node)
        if not is_factor and not (user.op == "call_method" and user.target == "to"):
            break
        node = user
    return node


define_operator("keep(Tensor tensor) -> Tensor", torch.clone, torch.empty_like)
