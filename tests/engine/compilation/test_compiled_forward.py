"""The compiled forward, compared with the eager one, and cases without one."""

import errno
import logging
import os
import shutil
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.attention.backend import Scoring, StepAttention
from engine.attention.opaque import OpaqueAttention, attending
from engine.build import assemble
from engine.compilation import packages
from engine.compilation.build_package import Job
from engine.compilation.forward import EagerForward, PackagedForward
from engine.compilation.packages import CompiledWhenReady, choose_forward
from engine.compilation.trial import scratch_attention, step_of
from engine.core.engine_core import EngineCore
from engine.kernels.linear import can_pack, pack_linears
from engine.kernels.native_library import KernelsUnavailable
from engine.model.load import LoadedModel, load_model
from engine.model.progress import silent
from engine.ports import EngineRequest
from tests.engine.tiny_engine import VOCAB, greedy, make_engine, prompt, read_page, run, save_tiny, small


@pytest.mark.model
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_a_compiled_model_gives_the_ids_of_the_eager_one_and_writes_only_its_own_pages(
    tiny: LoadedModel, tiny_dir: Path, compile_home: Path
) -> None:
    """A decode step of one token is padded to two: the second must have no effect."""
    config = small(compile="wait")
    forward = choose_forward(str(tiny_dir), tiny, config, compile_home, silent)
    compiled = assemble(tiny, config, forward)
    eager = make_engine(tiny)
    for count in (1, 8):
        requests = [EngineRequest(f"{count}-{i}", prompt(3 + 17 * i, start=i), greedy(24)) for i in range(count)]
        assert run(compiled, requests).tokens == run(eager, requests).tokens
    if shutil.which(os.environ.get("CXX", "g++")) is None:  # what must be true on a machine without a C++ compiler
        assert isinstance(forward, EagerForward)
        return
    assert isinstance(forward, CompiledWhenReady)
    assert isinstance(forward._forward, PackagedForward)
    assert Path(forward._job.package).parent == compile_home / "compile"
    left = {path.suffix for path in compile_home.glob(f"compile/{Path(forward._job.package).stem}*")}
    assert left == {".lock", ".package"}, "nothing unfinished is left"
    for page in range(eager.kv_region.num_pages):
        assert any(read_page(compiled, page)) == any(read_page(eager, page))


@pytest.mark.model
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_a_package_of_a_model_with_packed_weights_has_none_of_its_own(
    tmp_path: Path, compile_home: Path, kernel: str | None
) -> None:
    if kernel is not None or not can_pack():
        pytest.skip(kernel or "this processor has no dot product for bfloat16")
    directory = save_tiny(tmp_path / "wide", intermediate_size=128, vocab_size=4096)
    config = small(dtype="bfloat16", compile="wait")
    loaded = load_model(str(directory), config, tmp_path, silent)
    pack_linears(loaded.module)
    forward = choose_forward(str(directory), loaded, config, compile_home, silent)
    assert isinstance(forward, CompiledWhenReady)
    package = forward._loaded
    assert isinstance(package, PackagedForward)
    ours = {parameter.data_ptr() for parameter in loaded.module.parameters()}
    assert len(package._weights) > len(ours) / 2
    assert {weight.data_ptr() for name, weight in package._weights.items() if "rotary" not in name} <= ours
    files = {path.name: path.read_bytes() for path in Path(forward._job.package).iterdir()}
    assert files.keys() == {"forward.so", "forward.json"}
    matrices = [parameter for parameter in loaded.module.parameters() if parameter.ndim == 2]
    assert not any(matrix[0].view(torch.uint8).numpy().tobytes() in files["forward.so"] for matrix in matrices)
    _check_that_others_run_meanwhile(package, loaded)
    requests = [EngineRequest("r", prompt(20), greedy(8))]
    assert set(run(assemble(loaded, config, forward), requests).finish) == {"r"}


def _check_that_others_run_meanwhile(package: PackagedForward, loaded: LoadedModel) -> None:
    """A worker that held Python's lock neither answered nor transferred KV during a step."""
    step = step_of(scratch_attention(loaded.layout, 40), loaded.layout, 40, 40)
    inputs = [torch.arange(40), torch.arange(40), torch.arange(40), step.pool, step.plan]
    ticks, done = 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not done.wait(1e-4):
            ticks += 1

    before = sys.getswitchinterval()
    sys.setswitchinterval(60)  # a thread keeps the lock until it releases it
    ticking = threading.Thread(target=tick)
    try:
        ticking.start()
        for _ in range(100):
            package._package.run(inputs)
        seen = ticks
    finally:
        done.set()
        ticking.join()
        sys.setswitchinterval(before)
    assert seen > 20


class Seen:
    """Attention that records its inputs and returns ones."""

    def __init__(self) -> None:
        self.shapes: list[list[int]] = []
        self.sinks: list[Tensor | None] = []

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, *, sinks: Tensor | None = None
    ) -> Tensor:
        self.sinks.append(sinks)
        self.shapes.append([tensor.shape[2] for tensor in (query, key, value)])
        return torch.ones(1, query.shape[2], query.shape[1], query.shape[3])


def test_padding_does_not_reach_attention_and_comes_back_as_zeros() -> None:
    seen = Seen()
    query, key = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8)
    with attending(seen, num_tokens=2):
        out = OpaqueAttention().attend(0, query, key, key, Scoring(1.0))
        OpaqueAttention().attend(0, query, key, key, Scoring(1.0), sinks=torch.ones(4))
    assert seen.shapes == [[2, 2, 2]] * 2
    assert [None if sinks is None else sinks.tolist() for sinks in seen.sinks] == [None, [1.0] * 4]
    assert out[:, :2].eq(1).all()
    assert out[:, 2:].eq(0).all()


def test_attention_without_a_step_is_an_error() -> None:
    with pytest.raises(LookupError):
        OpaqueAttention().attend(0, *(torch.zeros(1, 2, 3, 8),) * 3, Scoring(1.0))


def test_a_small_model_is_not_compiled(tiny: LoadedModel, tmp_path: Path) -> None:
    forward = choose_forward("tiny", tiny, small(compile="auto"), tmp_path, silent)
    assert isinstance(forward, EagerForward)
    assert not list(tmp_path.iterdir())


def test_without_a_compiler_the_model_runs_eagerly_and_says_so(
    tiny: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with caplog.at_level(logging.INFO):
        forward = choose_forward("tiny", tiny, small(compile="wait"), tmp_path, silent)
    assert isinstance(forward, EagerForward)
    assert ["no-such-compiler" in vars(record)["reason"] for record in caplog.records] == [True]


def test_a_model_that_cannot_be_compiled_runs_eagerly_and_logs_why(
    tiny: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The compiling process does not find the model."""
    monkeypatch.setenv("CXX", sys.executable)  # the compiler is not reached
    config = small(compile="wait", compile_timeout_s=100)
    with caplog.at_level(logging.INFO):
        forward = choose_forward(str(tmp_path / "nowhere"), tiny, config, tmp_path, silent)
    assert "nowhere" in vars(caplog.records[-1])["reason"]
    engine: EngineCore = assemble(tiny, config, forward)
    requests = [EngineRequest("r", prompt(20), greedy(8))]
    assert run(engine, requests).tokens == run(make_engine(tiny), requests).tokens


class Wrong:
    """A package that computes something, and one that cannot run."""

    def __init__(self, path: Path, _module: object, _state_dir: Path) -> None:
        self._runs = (path / "forward.so").read_text() == "runs"

    def __call__(self, token_ids: Tensor, positions: Tensor, keep: Tensor, step: StepAttention) -> Tensor:
        if not self._runs:
            raise RuntimeError("it was made for something else")
        return torch.randn(len(keep), VOCAB)


@pytest.mark.parametrize(
    ("content", "reason", "kept"), [("runs", "rounding", True), ("does not", "made for something else", False)]
)
def test_a_package_is_tried_before_it_is_used(
    content: str,
    reason: str,
    kept: bool,
    tiny: LoadedModel,
    tmp_path: Path,
    kernel: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A package of other code failed every step."""
    if kernel is not None:
        pytest.skip(kernel)
    config = small(compile="wait")
    package = packages._package_path(tiny, config, tmp_path)
    package.mkdir(parents=True)
    (package / "forward.so").write_text(content)
    monkeypatch.setattr(packages, "PackagedForward", Wrong)
    with caplog.at_level(logging.WARNING):
        forward = choose_forward("tiny", tiny, config, tmp_path, silent)
    assert reason in vars(caplog.records[-1])["reason"]
    assert package.exists() == kept
    requests = [EngineRequest("r", prompt(20), greedy(8))]
    assert run(assemble(tiny, config, forward), requests).tokens == run(make_engine(tiny), requests).tokens


def test_a_sound_package_outlives_a_trial_that_fails_for_another_reason(
    tiny: LoadedModel, tmp_path: Path, kernel: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a full disk the class that runs packages was not compiled, and each start replaced the package."""
    if kernel is not None:
        pytest.skip(kernel)

    def full(*_args: object) -> None:
        raise KernelsUnavailable("No space left on device")

    config = small(compile="wait")
    package = packages._package_path(tiny, config, tmp_path)
    package.mkdir(parents=True)
    monkeypatch.setattr(packages, "PackagedForward", full)
    choose_forward("tiny", tiny, config, tmp_path, silent)
    assert package.is_dir()


def test_a_package_that_is_removed_while_it_is_marked_as_used_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file replaced it, which no start could load or remove."""
    package = tmp_path / "one.package"
    made: list[Path] = []

    def make(*_args: object) -> None:
        package.mkdir()
        made.append(package)

    monkeypatch.setattr(packages, "_run_child", make)
    job = Job("model", str(tmp_path), str(package), small())
    packages._build(job)
    packages._build(job)
    assert len(made) == 1
    package.rmdir()
    packages._build(job)
    assert len(made) == 2
    assert package.is_dir()


def test_a_package_in_a_directory_that_cannot_be_written_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening its lock fails on a read-only mount, and in a directory of another user."""
    package = tmp_path / "one.package"
    package.mkdir()

    def read_only(*_args: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "utime", read_only)
    monkeypatch.setattr(packages, "locked", read_only)
    packages._build(Job("model", str(tmp_path), str(package), small()))


def test_the_package_of_another_model_or_thread_count_is_another(
    tiny: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = packages._package_path(tiny, small(), tmp_path)
    assert packages._package_path(tiny, small(), tmp_path) == one
    assert packages._package_path(tiny, small(max_step_tokens=64), tmp_path) != one
    monkeypatch.setattr(torch, "__version__", "0.0")
    assert packages._package_path(tiny, small(), tmp_path) != one


def test_only_the_packages_used_last_are_kept(tmp_path: Path) -> None:
    for i in range(6):
        package = tmp_path / f"{i}.package"
        package.mkdir()
        (package / "forward.so").touch()
        os.utime(package, (i, i))
    packages._forget_old(tmp_path)
    assert sorted(path.stem for path in tmp_path.glob("*.package")) == ["2", "3", "4", "5"]


def test_what_killed_compilations_have_left_goes_after_a_day(tmp_path: Path) -> None:
    """Packages of other models or releases never removed it."""
    for age_s in (0, 3600, 2 * 24 * 3600):
        left = tmp_path / f"{age_s}.unfinished"
        left.mkdir()
        os.utime(left, (time.time() - age_s,) * 2)
    packages._forget_old(tmp_path)
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["0", "3600"]
