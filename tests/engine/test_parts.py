"""The KV pool gets the remaining memory. The device is the CPU with counted memory."""

import gc
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from components.startup import CannotServe, WrongSettings
from engine import parts as parts_module
from engine.build import assemble
from engine.config import EngineConfig, StepSize
from engine.device import huge_pages
from engine.device.memory import MemoryReading, MemoryUse
from engine.model.load import LoadedModel
from engine.parts import Parts, make_parts
from engine.ports import EngineRequest, Phase
from tests.engine.attention.idle_kernels import idle_kernels
from tests.engine.device.counted_memory import CountedMemory, Graphs
from tests.engine.embedding_model import save_embedding_model
from tests.engine.tiny_engine import greedy, load_tiny, make_engine, prompt, run, small

TOTAL = 24_000_000
GRAPHS = Graphs(first=400_000, each=20_000)


@pytest.fixture(autouse=True)
def _exact_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the pool its own block of memory, not the rest of 64 MB."""
    monkeypatch.setattr(huge_pages, "BLOCK_BYTES", 0)


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    """Triton's interpreter leaves cycles that hold tensors; the kernels do not."""
    before = gc.get_threshold()
    gc.set_threshold(100)
    yield
    gc.set_threshold(*before)


@pytest.fixture
def fresh(tiny_dir: Path) -> LoadedModel:
    """A model for one test, which changes its linear layers."""
    return load_tiny(tiny_dir)


def settings(**changes: object) -> EngineConfig:
    return small(**{"num_pages": None, "max_running": 6, "max_step_tokens": 32, "attention": "triton", **changes})


def made(loaded: LoadedModel, memory: CountedMemory, config: EngineConfig, graphs: Graphs = GRAPHS) -> Parts:
    return make_parts(loaded, config, memory=memory, make_forward=graphs.forward)


def plain(loaded: LoadedModel, memory: CountedMemory, **changes: object) -> int:
    """The number of pages, without graphs."""
    parts = make_parts(loaded, settings(attention="torch", **changes), memory=memory)
    return len(parts.pool.storage)


def facts(caplog: pytest.LogCaptureFixture) -> dict[str, float]:
    (record,) = [record for record in caplog.records if record.getMessage() == "the device's memory is divided"]
    return vars(record)


def test_the_pool_takes_what_is_left_and_a_full_engine_stays_within_its_share(
    tiny: LoadedModel, fresh: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    """Prompts fill a step, all rows draw, decodes run from graphs: no operation exceeds the share."""
    config, graphs = settings(), Graphs(400_000, 20_000)
    requests = [EngineRequest(str(i), prompt(20 + i, start=i), greedy(4, top_p=0.9)) for i in range(6)]
    with CountedMemory(TOTAL, fresh) as memory, caplog.at_level(logging.INFO):
        parts = made(fresh, memory, config, graphs)
        memory.start_peak()
        tokens = run(assemble(fresh, config, parts.model.forward, parts.pool), requests).tokens
        peak = memory.peak()
    assert tokens == run(make_engine(tiny, max_running=6, max_step_tokens=32), requests).tokens
    assert graphs.replayed > 0
    assert peak <= 0.9 * TOTAL
    assert peak > 0.85 * TOTAL, "and memory is used"
    assert len(parts.pool.storage) > 1800
    assert "device" in facts(caplog)


def test_the_trial_leaves_nothing_behind_and_the_log_says_what_went_where(
    fresh: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    with CountedMemory(TOTAL, fresh, others=100_000) as memory, caplog.at_level(logging.INFO), idle_kernels():
        weights = memory.own
        parts = made(fresh, memory, settings())
        own = memory.own
    told, pool = facts(caplog), parts.pool.storage
    assert told["pages"] == len(pool)
    sizes = 3  # graphs of 6, 4 and 2 rows
    graphs = 400_000 + sizes * 20_000
    tables = own - weights - pool.nbytes - graphs
    assert 0 <= tables < 100_000, "pages and graphs of the trial are free"
    in_gb = {name: value for name, value in told.items() if name.endswith("_gb")}
    assert in_gb == {
        "total_gb": 0.02,
        "weights_gb": round(weights / 1e9, 2),
        "compiled_gb": 0.0,
        "activations_gb": 0.0,
        "graphs_gb": 0.0,
        "outside_gb": 0.0,
        "kv_gb": 0.02,
        "free_gb": 0.0,
    }


def test_what_graphs_hold_is_learnt_from_a_few_of_them(fresh: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 5 graphs the trial records 2."""
    monkeypatch.setattr(parts_module, "TRIAL_GRAPHS", 2)
    config, graphs = settings(max_running=24, max_step_tokens=32), Graphs(900_000, 200_000)
    with CountedMemory(TOTAL, fresh) as memory, idle_kernels():
        parts = made(fresh, memory, config, graphs)
        left = TOTAL - memory.measure().own
    held = 0.1 * TOTAL  # and the activations of a step
    assert held < left < held + 350_000
    assert parts.pool.max_context > 400


def test_what_another_worker_takes_while_graphs_are_measured_is_not_multiplied() -> None:
    own, others = 1000, 0

    class Forward:
        def record(self, _attention: object, _progress: object, most: int) -> tuple[int, int]:
            nonlocal own, others
            own += 100 if most == 1 else 30
            others += 5000
            return most, 35

    class Memory:
        def measure(self) -> MemoryReading:
            return MemoryReading(10**6, 10**6 - own - others, own)

    parts: Any = parts_module
    graphs = parts._trial_graphs(Forward(), SimpleNamespace(attention=None), Memory())
    assert graphs == 100 + 34 * 30 // (parts.TRIAL_GRAPHS - 1)


def test_pages_of_other_processes_are_not_counted_as_free(fresh: LoadedModel) -> None:
    with CountedMemory(TOTAL, fresh) as memory:
        alone = plain(fresh, memory)
        memory.others = TOTAL // 2
        beside = plain(fresh, memory)
        memory.measure()
        memory.others = TOTAL // 20  # what the share leaves to others anyway
        assert abs(plain(fresh, memory) - alone) < 60
    assert 0 < beside < 0.6 * alone


@pytest.mark.parametrize(("asked", "pages"), [({"num_pages": 77}, 77), ({"kv_memory_gb": 0.001}, 122)])
def test_a_number_that_the_settings_fix_wins(fresh: LoadedModel, asked: dict[str, float], pages: int) -> None:
    with CountedMemory(TOTAL, fresh) as memory:
        assert plain(fresh, memory, **asked) == pages


def missing(attempt: Callable[[], object]) -> tuple[str, int]:
    with pytest.raises(WrongSettings) as caught:
        attempt()
    found = re.search(r"so ([\d.]+) GB are missing", caught.value.message)
    assert found is not None
    return caught.value.message, round(float(found[1]) * 1e9)


def test_too_little_memory_says_how_much_is_missing_and_that_much_more_suffices(tiny_dir: Path) -> None:
    loaded = load_tiny(tiny_dir, page_size=64)
    config = settings(page_size=64, attention="torch", max_step_tokens=6000, max_running=80, gpu_memory_utilization=0.3)

    def attempt(total: int) -> Parts:
        with CountedMemory(total, loaded) as memory:
            return make_parts(loaded, config, memory=memory)

    message, lacking = missing(lambda: attempt(100_000_000))
    assert "KV pages for one request need" in message
    assert "raise engine.gpu_memory_utilization, lower engine.max_step_tokens or engine.max_running" in message
    enough = 100_000_000 + round((lacking + 5_000_000) / 0.3)  # a message has two digits
    assert len(attempt(enough).pool.storage) * 64 >= 512, "a request of the model's 512 positions"


def test_a_step_that_does_not_fit_is_named(tiny_dir: Path) -> None:
    loaded = load_tiny(tiny_dir)
    with (
        CountedMemory(12_000_000, loaded) as memory,
        pytest.raises(WrongSettings, match="largest step, 2000 tokens and 6 draws, does not fit beside weights"),
    ):
        make_parts(loaded, settings(max_step_tokens=2000, attention="torch"), memory=memory)


@pytest.mark.parametrize(
    ("free", "max_step_tokens", "why"),
    [
        (800_000, 32, "for one token"),
        (11_000_000, 2000, "the largest step"),
    ],
)
def test_memory_that_other_processes_hold_may_be_free_at_a_later_start(
    free: int, max_step_tokens: int, why: str, fresh: LoadedModel
) -> None:
    """It counted as wrong settings, so a restarted decode ended `kvmesh up`: a killed process's memory is freed late."""
    config = settings(max_step_tokens=max_step_tokens, max_context=512, attention="torch")
    with CountedMemory(150_000_000, fresh) as memory:
        memory.others = memory.total - memory.own - free
        with pytest.raises(CannotServe, match=why) as caught:
            make_parts(fresh, config, memory=memory)
    assert not isinstance(caught.value, WrongSettings)


def test_pages_that_other_processes_leave_no_room_for_may_fit_later(tiny: LoadedModel) -> None:
    use = MemoryUse(TOTAL, 490_000, 300_000, 0, 0, 0)
    parts: Any = parts_module
    with pytest.raises(CannotServe, match="KV pages for one request") as caught:
        parts._pages_left([use], tiny, settings())
    assert not isinstance(caught.value, WrongSettings)


def test_a_step_is_larger_on_a_gpu_unless_the_settings_say_otherwise() -> None:
    assert EngineConfig().step_size("cpu") == StepSize(64, 512)
    assert EngineConfig().step_size("cuda:1") == StepSize(256, 8192)
    assert EngineConfig(max_running=600).step_size("cpu") == StepSize(600, 602)
    assert EngineConfig(max_step_tokens=100).step_size("cuda:0") == StepSize(98, 100)
    assert EngineConfig(max_running=3, max_step_tokens=5).step_size("cuda:0") == StepSize(3, 5)


@pytest.mark.parametrize("mode", ["mean_tokens", "lasttoken"])
def test_an_embedding_model_is_measured_too(mode: str, tmp_path: Path) -> None:
    """A mean needs the hidden states of all tokens."""
    loaded = load_tiny(save_embedding_model(tmp_path, mode))
    with CountedMemory(TOTAL, loaded) as memory:
        parts = make_parts(loaded, settings(attention="torch", max_step_tokens=300), memory=memory)
        memory.start_peak()
        engine = assemble(loaded, settings(attention="torch", max_step_tokens=300), parts.model.forward, parts.pool)
        run(engine, [EngineRequest(str(i), prompt(48), greedy(1), Phase.EMBED) for i in range(6)])
        assert 0.8 * TOTAL < memory.peak() <= 0.9 * TOTAL
