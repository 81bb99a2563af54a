"""The engine on one and two simulated GPUs, with pinned copies, kernels and graphs."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from components.wire.sampling import SamplingParams
from engine.build import assemble, prepare_model
from engine.compilation import device
from engine.core.engine_core import EngineCore
from engine.model.progress import silent
from engine.parts import Pool, make_parts
from engine.ports import EngineRequest
from tests.engine.parallel.led import led
from tests.engine.simulated.simulated_cuda import simulated_cuda
from tests.engine.simulated.simulated_device import SimulatedDevice
from tests.engine.tiny_engine import (
    Seen,
    greedy,
    load_tiny,
    make_engine,
    prompt,
    run,
    run_until_idle,
    small,
)
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.skipif(torch.version.cuda is not None, reason="for a torch without CUDA"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels run in Triton's interpreter"),
]

GPU = {"device": "cuda:0", "attention": "triton", "compile": "wait", "compile_timeout_s": 120.0}
SIZES = {"max_running": 4, "num_pages": 40}
DRAWN = SamplingParams(max_tokens=4, temperature=0.8, top_p=0.9, top_k=20, seed=3, frequency_penalty=0.5, logprobs=2)
ASKED = [
    EngineRequest("short", prompt(5), greedy(5, ignore_eos=True)),
    EngineRequest("long", prompt(40, start=1), greedy(3, ignore_eos=True, prompt_logprobs=1)),
    EngineRequest("drawn", prompt(9, start=2), DRAWN),
]
AGAIN = [EngineRequest(f"r{i}", prompt(60, start=i % 3), greedy(4, ignore_eos=True)) for i in range(5)]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedDevice]:
    """A device whose compiler changes nothing."""
    monkeypatch.setattr(device, "torch_compile", lambda module: module)
    with simulated_cuda() as simulated:
        yield simulated


@pytest.fixture(scope="module")
def expected(tiny_dir: Path) -> dict[str, list[int]]:
    return run(make_engine(load_tiny(tiny_dir)), ASKED).tokens


@pytest.fixture(scope="module")
def expected_again(tiny_dir: Path) -> dict[str, list[int]]:
    return run(make_engine(load_tiny(tiny_dir)), AGAIN).tokens


def on_device(directory: Path, home: Path, **changes: object) -> tuple[EngineCore, Pool]:
    """An engine on the simulated device, with the forward and the pages that a worker has there."""
    config = small(**{**GPU, **SIZES, **changes})
    loaded = prepare_model(str(directory), config, home)
    parts = make_parts(loaded, config, silent)
    return assemble(loaded, config, parts.model.forward, parts.pool), parts.pool


@pytest.mark.parametrize("pipeline", ["off", "on"])
def test_steps_from_graphs_give_the_tokens_of_the_cpu_and_wait_for_nothing(
    tiny_dir: Path, tmp_path: Path, expected: dict[str, list[int]], gpu: SimulatedDevice, pipeline: str
) -> None:
    engine, _ = on_device(tiny_dir, tmp_path, pipeline=pipeline)
    assert engine.kv_region.device == "cuda:0"
    gpu.waits.clear()
    gpu.launches.clear()
    assert run(engine, ASKED).tokens == expected
    assert engine._runner.forward_kind == "graph"
    assert {"write_kernel", "prompt_kernel", "sample_kernel"} <= set(gpu.launches)
    assert gpu.waits == []


def test_two_devices_give_the_tokens_of_one(
    tiny_dir: Path, expected: dict[str, list[int]], gpu: SimulatedDevice
) -> None:
    with led(tiny_dir, 2, module="tests.engine.parallel.simulated_follower", **GPU, **SIZES) as instance:
        engine = instance.make(**GPU, **SIZES)
        gpu.waits.clear()
        assert run(engine, ASKED).tokens == expected
        assert engine._runner.forward_kind == "graph"
        assert gpu.waits == []


def test_pages_leave_the_device_for_files_and_come_back(
    tiny_dir: Path, tmp_path: Path, expected_again: dict[str, list[int]], gpu: SimulatedDevice
) -> None:
    engine, pool = on_device(tiny_dir, tmp_path, num_pages=6, reserve_tokens=0, kv_store_dir=tmp_path / "kv")
    seen = Seen()
    for request in AGAIN:
        engine.submit(request)
        run_until_idle(engine, seen)
        wait_until(lambda: not engine.step().stats.unsaved_pages)
    engine.close()
    assert seen.tokens == expected_again
    assert seen.cached["r4"] == 48
    assert gpu.registered == {pool.staging.data_ptr()}


def test_evicted_pages_leave_the_device_and_come_back(
    tiny_dir: Path, tmp_path: Path, expected_again: dict[str, list[int]], gpu: SimulatedDevice
) -> None:
    """Copies to and from registered memory do not wait one by one, but have ended before the next step."""
    page_bytes = 2 * 2 * 16 * 32 * 4  # layers, K and V, tokens, values of all heads in fp32
    engine, pool = on_device(tiny_dir, tmp_path, num_pages=6, reserve_tokens=0, kv_offload_gb=20 * page_bytes / 1e9)
    seen = Seen()
    for request in AGAIN:
        engine.submit(request)
        run_until_idle(engine, seen)
    assert seen.steps[-1].restored_pages > 0
    assert seen.cached["r4"] == 48
    assert seen.tokens == expected_again
    assert pool.offloaded.shape == (20, 2, 2, 2, 16, 16)
    assert gpu.registered == {pool.offloaded.data_ptr()}
