"""Tiny engines with random weights, and helpers for them."""

import ctypes
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from components.kv_transfer.device_pages import at
from components.wire.layout import KvLayout
from components.wire.logprobs import TokenLogprobs
from components.wire.sampling import SamplingParams
from components.wire.step_stats import StepStats
from components.wire.tokens import pack_tokens
from engine.build import assemble
from engine.compilation.device import DeviceForward
from engine.compilation.graphs import CudaRecorder, Recordable
from engine.config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.model.load import LoadedModel, load_model
from engine.model.progress import silent
from engine.parts import make_pool
from engine.ports import Engine, EngineRequest, Exposed, Failed, FinishReason, Phase, StepOutput
from engine.scheduler.request import RequestState
from tests.device import RECORDS, TESTED

VOCAB = 128
GENERATING = (Phase.FULL, Phase.PREFILL, Phase.DECODE)  # all but that of models that make embeddings
EOS = 5


def tiny_config(**changes: object) -> LlamaConfig:
    """A grouped-query Llama; initial weights are large, so that greedy decoding does not repeat one token."""
    settings = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "eos_token_id": EOS,
        "bos_token_id": 1,
    }
    return LlamaConfig(**{**settings, **changes})


def save_tiny(directory: Path, seed: int = 0, **changes: object) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(tiny_config(**changes)).save_pretrained(directory)
    return directory


PIPELINE = {"pipeline": "off"}  # the fixture `pipeline` writes it


def small(**changes: object) -> EngineConfig:
    settings = {
        **PIPELINE,
        **TESTED,
        "dtype": "float32",
        "num_pages": 64,
        "max_running": 16,
        "max_step_tokens": 48,
        "reserve_tokens": 16,
        "threads": 1,
    }
    return EngineConfig(**{**settings, **changes})


def offload_gb(layout: KvLayout, num_pages: int) -> float:
    """Return the setting that keeps `num_pages` evicted pages."""
    return (num_pages + 0.5) * layout.page_bytes / 1e9


def load_tiny(directory: Path, **changes: object) -> LoadedModel:
    return load_model(str(directory), small(**changes), Path("unused"), silent)


def make_engine(loaded: LoadedModel, **changes: object) -> EngineCore:
    config = small(**changes)
    if not RECORDS["graphs"] or loaded.device.type == "cpu":
        return assemble(loaded, config)
    pool = make_pool(loaded, config)
    if not isinstance(pool.attention, Recordable):
        return assemble(loaded, config, pool=pool)
    forward = DeviceForward(loaded, pool.attention, CudaRecorder, lambda module: module)
    forward.start(60.0, silent)
    recorded, wanted = forward.record(pool.attention, silent)
    assert recorded == wanted
    return assemble(loaded, config, forward, pool)


def prompt(length: int, start: int = 0) -> list[int]:
    """Return tokens that differ between pages, without an end of text."""
    return [6 + (start * 31 + i * 17 + i * i // 7) % (VOCAB - 6) for i in range(length)]


def peek(engine: Engine, token_ids: Sequence[int], cache_salt: str = "", adapter: str = "") -> int:
    return engine.peek_prefix(engine.prompt_blocks(pack_tokens(token_ids), cache_salt, adapter))


def cached_blocks(engine: EngineCore) -> list[bytes]:
    """Return the blocks of all cache events, also unreported ones, in the order of storing."""
    return list(engine._memory.prefix._page_of)


def greedy(max_tokens: int, **changes: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, **changes)


@dataclass
class Seen:
    """The contents of all engine outputs, by request; of branches except the first, by (request, branch)."""

    branches: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    branch_finish: dict[tuple[str, int], FinishReason] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    finish: dict[str, FinishReason] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)
    reserved: dict[str, Exposed] = field(default_factory=dict)
    computed: dict[str, list[Exposed]] = field(default_factory=dict)
    failed: dict[str, Failed] = field(default_factory=dict)
    steps: list[StepStats] = field(default_factory=list)

    def take(self, output: StepOutput) -> None:
        for tokens in output.tokens:
            if tokens.branch:
                key = (tokens.request_id, tokens.branch)
                self.branches.setdefault(key, []).extend(tokens.token_ids)
                if tokens.finish is not None:
                    self.branch_finish[key] = tokens.finish
                continue
            self.logprobs.setdefault(tokens.request_id, []).extend(tokens.logprobs or [])
            if tokens.prompt_logprobs is not None:
                assert tokens.request_id not in self.prompt_logprobs, "told once"
                self.prompt_logprobs[tokens.request_id] = tokens.prompt_logprobs
            self.cached.setdefault(tokens.request_id, tokens.num_cached_tokens)
            self.tokens.setdefault(tokens.request_id, []).extend(tokens.token_ids)
            if tokens.finish is not None:
                self.finish[tokens.request_id] = tokens.finish
        self.reserved |= {r.request_id: r for r in output.reserved}
        self.failed |= {f.request_id: f for f in output.failed}
        for computed in output.computed:
            self.computed.setdefault(computed.request_id, []).append(computed)
        self.steps.append(output.stats)

    @property
    def prompt_tokens(self) -> int:
        return sum(stats.prompt_tokens for stats in self.steps)


def check_pages(engine: EngineCore) -> None:
    """Check that no page is lost, and each is held as often as block tables list it.

    A request that ended in flight keeps its pages until the end of the step.
    """
    pool = engine._memory.pool
    pool.check()
    flying = {chunk.request for flight in (engine._flight, engine._behind) if flight for chunk in flight.chunks}
    leaving = [request for request in flying if request.state is RequestState.FINISHED]
    requests = [*engine._requests, *leaving]
    tables = [request.pages[request.first_page :] for request in requests]
    held = Counter(page for table in tables for page in table)
    assert dict(held) == {page: n for page, n in enumerate(pool._holders) if n}
    assert all(len(set(table)) == len(table) for table in tables)
    for request, table in zip(requests, tables, strict=True):
        assert set(request.pages[: request.first_page]) <= set(table[:1]), "another's page is in its block table"


def run_until_idle(engine: EngineCore, seen: Seen | None = None, max_steps: int = 2000) -> Seen:
    seen = seen or Seen()
    for _ in range(max_steps):
        if not engine.has_work():
            return seen
        seen.take(engine.step())
        check_pages(engine)
    raise AssertionError(f"still busy after {max_steps} steps")


def run(engine: EngineCore, requests: Iterable[EngineRequest]) -> Seen:
    for request in requests:
        engine.submit(request)
    return run_until_idle(engine)


_ALONE: Final[dict[tuple[object, ...], tuple[LoadedModel, list[int]]]] = {}


def alone(loaded: LoadedModel, token_ids: Sequence[int], sampling: SamplingParams, **changes: object) -> list[int]:
    """Return the tokens on an idle engine, computed once for each model, request and configuration."""
    config = small(**changes)
    key = (id(loaded), tuple(token_ids), repr(sampling), repr(config))
    if key not in _ALONE:
        seen = run(assemble(loaded, config), [EngineRequest("alone", token_ids, sampling)])
        _ALONE[key] = loaded, seen.tokens["alone"]  # the model is kept: another one would get its id
    return list(_ALONE[key][1])


def page_bytes(engine: EngineCore) -> int:
    """Return the bytes of a page on all ranks."""
    region = engine.kv_region
    return region.layout.page_bytes * (1 + len(region.followers))


def read_page(engine: EngineCore, page: int) -> bytes:
    """Return the parts of all ranks, in order."""
    region, size = engine.kv_region, engine.kv_region.layout.page_bytes
    if region.device != "cpu":
        return at(region)[page].cpu().numpy().tobytes()
    parts = [ctypes.string_at(region.address + page * size, size)]
    for rank in region.followers:
        with Path(f"/proc/{rank.pid}/mem").open("rb", buffering=0) as memory:
            parts.append(os.pread(memory.fileno(), size, rank.address + page * size))
    return b"".join(parts)


def write_page(engine: EngineCore, page: int, data: bytes) -> None:
    region, size = engine.kv_region, engine.kv_region.layout.page_bytes
    assert len(data) == page_bytes(engine)
    if region.device != "cpu":
        target = at(region)[page]
        target.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8).view(target.shape))
        return
    ctypes.memmove(region.address + page * size, data[:size], size)
    for i, rank in enumerate(region.followers, 1):
        with Path(f"/proc/{rank.pid}/mem").open("r+b", buffering=0) as memory:
            os.pwrite(memory.fileno(), data[i * size : (i + 1) * size], rank.address + page * size)


def prefilled(engine: EngineCore, request_id: str, token_ids: Sequence[int], sampling: SamplingParams) -> Exposed:
    """Compute a prompt as a PREFILL request; its pages stay held."""
    return run(engine, [EngineRequest(request_id, token_ids, sampling, Phase.PREFILL)]).computed[request_id][-1]
