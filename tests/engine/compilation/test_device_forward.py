"""The forward for CUDA devices on a CPU: kernels interpreted, recording faked, the compiler one that changes nothing."""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir

from components.wire.layout import of_shard
from engine import build
from engine.attention.backend import AttentionBackend, StepAttention, StepShape
from engine.attention.triton_backend import TritonAttention, TritonStep
from engine.build import assemble
from engine.compilation import device
from engine.compilation.device import DeviceForward, choose_device_forward, torch_compile
from engine.compilation.forward import EagerForward
from engine.compilation.graphs import CaptureFailed, Compute
from engine.model.load import LoadedModel
from engine.model.progress import silent
from engine.parts import make_pool
from engine.ports import EngineRequest
from tests.engine.attention.idle_kernels import idle_kernels
from tests.engine.tiny_engine import greedy, load_tiny, make_engine, prompt, run, save_tiny, small
from tests.waiting import PATIENCE_S

REQUESTS = [EngineRequest(str(i), prompt(4 + 13 * i, start=i), greedy(3 + i)) for i in range(3)]


@pytest.fixture
def fresh(tiny_dir: Path) -> LoadedModel:
    """A model for one test, which changes its linear layers."""
    return load_tiny(tiny_dir)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch compiles again for another number of threads, as on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class CountingRecorder:
    def __init__(self) -> None:
        self.replays = 0

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        def replay() -> None:
            self.replays += 1
            work()

        return replay


def test_graphs_that_are_missing_when_time_is_up_are_reported(
    fresh: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pool = make_pool(fresh, small(max_running=24, attention="triton"))
    forward = DeviceForward(fresh, pool.attention, CountingRecorder, lambda module: module)
    with idle_kernels():
        forward.start(1000.0, silent)
        monkeypatch.setattr(device, "RECORD_S", -1.0)
        assert forward.record(pool.attention, silent) == (1, 5)
        assert "decodes run in larger CUDA graphs than necessary" in caplog.text
        caplog.clear()
        assert forward.record(pool.attention, silent, most=1) == (1, 5)
        assert not caplog.text
        monkeypatch.setattr(device, "RECORD_S", 1000.0)
        assert forward.record(pool.attention, silent) == (5, 5)
        assert forward.record(pool.attention, silent, most=9) == (5, 5)
        assert not caplog.text


def test_prompts_run_compiled_and_decodes_from_graphs_with_the_ids_of_the_eager_cpu_engine(
    tiny: LoadedModel, fresh: LoadedModel, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From one compilation: another one would stop a serving engine for a minute.

    Contexts have up to two spans.
    """
    monkeypatch.setitem(TritonAttention.__init__.__kwdefaults__, "span", 32)
    torch._dynamo.reset()
    config = small(attention="triton", max_running=4, num_pages=24)
    pool, record = make_pool(fresh, config), CountingRecorder()
    compiler = partial(torch.compile, fullgraph=True, backend="eager")
    forward = DeviceForward(fresh, pool.attention, lambda: record, compiler)
    told: list[str] = []
    with torch._dynamo.config.patch(error_on_recompile=True):
        forward.start(1000.0, lambda task, _done, _total: told.append(task))
        forward.record(pool.attention, lambda task, _done, _total: told.append(task))
        tokens = run(assemble(fresh, config, forward, pool), REQUESTS).tokens
    assert set(told) == {"Compiling the model", "Recording CUDA graphs"}
    assert tokens == run(make_engine(tiny), REQUESTS).tokens
    assert record.replays >= 3


def test_until_it_is_compiled_the_model_runs_eagerly_and_then_adopts_what_was_made(
    tiny: LoadedModel, fresh: LoadedModel
) -> None:
    made: list[Compute] = []

    def compiler(module: torch.nn.Module) -> Compute:
        made.append(module)
        return module

    config = small()
    pool = make_pool(fresh, config)
    forward = DeviceForward(fresh, pool.attention, None, compiler)
    engine = assemble(fresh, config, forward, pool)
    expected = run(make_engine(tiny), REQUESTS).tokens
    assert run(engine, REQUESTS).tokens == expected
    assert forward._compute is None
    forward.start(0.0, silent)
    forward._thread.join()
    again = [EngineRequest(f"{request.request_id}'", request.token_ids, request.sampling) for request in REQUESTS]
    assert list(run(engine, again).tokens.values()) == list(expected.values())
    assert forward._compute is made[0]


def test_a_compiler_that_fails_is_said_once_and_eager_modules_are_recorded_instead(
    fresh: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_module: torch.nn.Module) -> Compute:
        raise RuntimeError("no such intrinsic")

    config = small(attention="triton", max_running=2, num_pages=24)
    pool, record = make_pool(fresh, config), CountingRecorder()
    forward = DeviceForward(fresh, pool.attention, lambda: record, fail)
    with caplog.at_level(logging.INFO), idle_kernels():
        forward.start(1000.0, silent)
        forward.record(pool.attention, silent)
    assert [vars(record)["reason"] for record in caplog.records] == ["no such intrinsic"]
    assert len(run(assemble(fresh, config, forward, pool), REQUESTS[:1]).tokens["0"]) == 3
    assert record.replays == 2


def test_without_a_compiler_or_when_told_so_the_model_runs_eagerly(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pool = make_pool(tiny, small())
    with caplog.at_level(logging.INFO):
        assert isinstance(choose_device_forward(tiny, small(compile="off"), pool.attention, silent), EagerForward)
        monkeypatch.setattr(device, "find_c_compiler", lambda: None)
        assert isinstance(choose_device_forward(tiny, small(compile="wait"), pool.attention, silent), EagerForward)
    first, second = caplog.records
    assert vars(first)["reason"] == "compile is off"
    assert "no C compiler" in vars(second)["reason"]


def test_the_compiler_for_devices_is_inductor_with_siblings_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def inductor(traced: torch.fx.GraphModule, _inputs: object) -> object:
        seen.append(sum(node.target is torch.nn.functional.linear for node in traced.graph.nodes))
        return traced.forward

    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3, 3))

        def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
            x = token_ids.float()
            linear = torch.nn.functional.linear
            return linear(x, self.weight) + linear(x, self.weight)

    torch._dynamo.reset()
    known = torch._dynamo.lookup_backend
    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: inductor if name == "inductor" else known(name))
    ids = torch.arange(3)
    with torch.inference_mode():
        assert torch_compile(Twice())(ids, ids, ids).tolist() == [6.0, 6.0, 6.0]
    assert seen == [1]


@pytest.mark.parametrize("failing", [1, 3], ids=["the largest", "a later one"])
def test_graphs_that_cannot_be_recorded_are_done_without(
    tiny: LoadedModel, fresh: LoadedModel, failing: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A failed capture during serving ended the worker, or was repeated at each step."""
    tried: list[int] = []

    def record(work: Callable[[], None]) -> Callable[[], None]:
        tried.append(len(tried))
        if len(tried) == failing:
            raise CaptureFailed("operation not permitted when stream is capturing")
        return work

    config = small(attention="triton", max_running=16, num_pages=24)
    pool = make_pool(fresh, config)
    forward = DeviceForward(fresh, pool.attention, lambda: record, lambda module: module)
    with idle_kernels():
        forward.start(1000.0, silent)
        forward.record(pool.attention, silent)
    (warning,) = [log for log in caplog.records if log.levelno >= logging.WARNING]
    assert warning.message == "decodes run without CUDA graphs: recording them failed"
    assert "not permitted when stream is capturing" in vars(warning)["reason"]
    assert run(assemble(fresh, config, forward, pool), REQUESTS).tokens == run(make_engine(tiny), REQUESTS).tokens
    assert len(tried) == failing, "it is not tried again"


def of_two_ranks(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, other: Callable[[int], int]
) -> tuple[DeviceForward, AttentionBackend, CountingRecorder]:
    """Make a forward of one of two ranks. `other`: the other rank's report of its n-th graph."""
    counts = count()
    monkeypatch.setattr(device, "of_all_ranks", lambda own, _device: [own, [other(next(counts))]])
    pool, record = make_pool(loaded, small(max_running=24, attention="triton")), CountingRecorder()
    rank = replace(loaded, layout=of_shard(loaded.layout, 0, 2))
    return DeviceForward(rank, pool.attention, lambda: record, lambda module: module), pool.attention, record


def test_ranks_record_all_graphs_however_long_it_takes(fresh: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank stopped by its own clock, so one replayed a graph that the other did not have."""
    forward, attention, _ = of_two_ranks(fresh, monkeypatch, lambda _number: 1)
    monkeypatch.setattr(device, "RECORD_S", -1.0)
    with idle_kernels():
        forward.start(1000.0, silent)
        assert forward.record(attention, silent) == (5, 5)


def test_a_graph_that_one_rank_cannot_record_no_rank_has(
    fresh: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The other ranks kept their graphs, and waited forever for this rank's part of the sums."""
    forward, attention, record = of_two_ranks(fresh, monkeypatch, lambda number: int(number < 2))
    with idle_kernels():
        forward.start(1000.0, silent)
        assert forward.record(attention, silent) == (0, 0)
        assert forward.record(attention, silent) == (0, 0)
    (warning,) = [log for log in caplog.records if log.levelno >= logging.WARNING]
    assert warning.message == "decodes run without CUDA graphs: recording them failed"
    assert vars(warning)["reason"] == "another rank failed"
    assert forward._graphs is None
    assert record.replays == 0


def test_what_is_compiled_too_late_is_adopted_without_graphs(
    fresh: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    """They would be captured while it serves."""
    go_on = threading.Event()

    def compiler(module: torch.nn.Module) -> Compute:
        go_on.wait(PATIENCE_S)
        return module

    config = small(attention="triton", max_running=2)
    pool, record = make_pool(fresh, config), CountingRecorder()
    forward = DeviceForward(fresh, pool.attention, lambda: record, compiler)
    forward.start(0.01, silent)
    assert forward.record(pool.attention, silent) == (0, 0)
    assert "decodes run without CUDA graphs, because the model is not compiled yet" in caplog.messages
    go_on.set()
    forward._thread.join()
    assert len(run(assemble(fresh, config, forward, pool), REQUESTS[:1]).tokens["0"]) == 3
    assert forward._compute is not None
    assert record.replays == 0


@pytest.mark.parametrize("heads", [2, 16])
def test_prompt_kernels_with_one_span_and_with_several_are_compiled_before_serving(
    heads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 16 queries a key, 16 tokens are two blocks, whose spans are longer: several were compiled while it served."""
    directory = save_tiny(tmp_path, num_attention_heads=heads, num_key_value_heads=1, max_position_embeddings=9000)
    loaded = load_tiny(directory)
    pool = make_pool(loaded, small(attention="triton", num_pages=600))
    launched: set[tuple[int, bool]] = set()
    plan = pool.attention.plan

    def planned(shape: StepShape) -> StepAttention:
        step = plan(shape)
        assert isinstance(step, TritonStep)
        assert step.filled is not None
        launched.update((blocks.size, bool(blocks.split)) for blocks in step.filled.prompts)
        return step

    monkeypatch.setattr(pool.attention, "plan", planned)
    with idle_kernels():
        DeviceForward(loaded, pool.attention, None, lambda module: module).start(60.0, silent)
    sizes = range(len({size for size, _ in launched}))
    assert launched == {(size, split) for size in sizes for split in (False, True)}


@pytest.mark.parametrize("compile_setting", ["auto", "wait"])
def test_on_a_device_a_start_waits_for_the_compiler(
    fresh: LoadedModel, compile_setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With auto it compiled for minutes while it served, then captured graphs."""
    waited: list[float] = []
    monkeypatch.setattr(device, "why_eager", lambda _config: None)
    monkeypatch.setattr(DeviceForward, "start", lambda _self, timeout_s, _progress: waited.append(timeout_s))
    config = small(compile=compile_setting, compile_timeout_s=77.0)
    choose_device_forward(fresh, config, make_pool(fresh, config).attention, silent)
    assert waited == [77.0]


@pytest.mark.parametrize("given", [False, True])
def test_what_is_compiled_for_a_device_is_kept_in_the_state_directory(
    tiny: LoadedModel, tmp_path: Path, given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was kept in /tmp, so a container compiled for minutes at each start."""
    names = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
    for name in names:
        monkeypatch.setenv(name, "/elsewhere")
        if not given:
            monkeypatch.delenv(name)
    there: dict[str, str] = {}

    def make(*_args: object) -> None:  # kernels of ours are compiled in it
        there.update({name: os.environ[name] for name in names})
        raise LookupError

    monkeypatch.setattr(build, "load_model", lambda *_args: replace(tiny, device=torch.device("cuda", 1)))
    monkeypatch.setattr(build, "pack_linears", lambda _module: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _device: None)
    monkeypatch.setattr(build, "make_parts", make)
    with pytest.raises(LookupError):
        build.build_engine("m", small(), tmp_path)
    home = tmp_path / "compile"
    assert there == {name: "/elsewhere" if given else str(home / last) for name, last in names.items()}
    if not given:
        assert cache_dir() == str(home / "inductor")
