"""Builds and loads a model's compiled package."""

import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Final

import torch
import transformers

from engine.attention.backend import StepAttention
from engine.attention.choose_attention import why_not_cpu
from engine.compilation.build_package import UNFINISHED, Job
from engine.compilation.forward import EagerForward, Forward, PackagedForward, has_own_weights
from engine.compilation.trial import difference
from engine.config import EngineConfig
from engine.cpu.machine import NoCompiler, compiler, fingerprint, locked, processor
from engine.kernels.native_library import kernel_sources, source_texts
from engine.model.load import LoadedModel
from engine.model.progress import Progress

log = logging.getLogger(__name__)

FORMAT: Final = 7  # increment when the exported code changes
MIN_PARAMETERS: Final = 50_000_000  # compiling a smaller model is not worth a minute
MAX_PARAMETERS: Final = 2_000_000_000  # limit for packages with their own weights
KEPT_PACKAGES: Final = 4
LEFT_AFTER_S: Final = 24 * 3600.0  # age of an unfinished package that no compilation reaches


class CompilationFailed(Exception):
    pass


class CompiledWhenReady:
    """Runs eagerly until a child process has built the package."""

    def __init__(self, loaded: LoadedModel, job: Job) -> None:
        self._forward: Forward = EagerForward(loaded.module)
        self._model = loaded
        self._job = job
        self._loaded: Forward | None = None  # set by the compiling thread
        self._thread = threading.Thread(target=self._prepare, name="compile", daemon=True)

    def start(self, timeout_s: float) -> None:
        if Path(self._job.package).exists():
            self._prepare()
            return
        log.info("compiling the model, which runs eagerly until then", extra={"package": self._job.package})
        self._thread.start()
        if timeout_s > 0:
            self._thread.join(timeout_s)

    @property
    def kind(self) -> str:
        return self._forward.kind

    def is_compiling(self) -> bool:
        """Return True even if it is another worker that compiles."""
        return self._thread.is_alive()

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor, step: StepAttention
    ) -> torch.Tensor:
        if self._loaded is not None:
            self._forward, self._loaded = self._loaded, None
        return self._forward(token_ids, positions, keep, step)

    def _prepare(self) -> None:
        try:
            _build(self._job)
            self._loaded = self._tried()
            log.info("the compiled model is now used", extra={"package": self._job.package})
        except Exception as exc:  # noqa: BLE001 - a compiler or a damaged file may raise anything, and eager always works
            log.warning("the model runs eagerly, because compiling it failed", extra={"reason": str(exc)})

    def _tried(self) -> Forward:
        """Load the package. Raises: CompilationFailed, if its logits differ from the eager model's."""
        path = Path(self._job.package)
        try:
            forward = PackagedForward(path, self._model.module, Path(self._job.state_dir))
            far = difference(self._model.module, forward, self._model.layout)
        except RuntimeError:  # a damaged package; a full disk or too little memory raises another error
            shutil.rmtree(path, ignore_errors=True)  # the next start builds another
            raise
        if not far <= 1:  # true for NaN
            raise CompilationFailed(f"its logits differ by {far:.1f} times the tolerance for rounding")
        return forward


def choose_forward(
    model: str, loaded: LoadedModel, config: EngineConfig, state_dir: Path, progress: Progress
) -> Forward:
    reason = _why_eager(loaded, config)
    if reason is not None:
        if config.compile != "off":
            log.info("the model runs eagerly", extra={"reason": reason})
        return EagerForward(loaded.module)
    job = Job(model, str(state_dir), str(_package_path(loaded, config, state_dir)), config)
    forward = CompiledWhenReady(loaded, job)
    if config.compile != "wait":
        forward.start(0.0)
        return forward
    progress("Compiling the model", 0, 1)
    forward.start(config.compile_timeout_s)
    progress("Compiling the model", 1, 1)
    return forward


def _why_eager(loaded: LoadedModel, config: EngineConfig) -> str | None:
    parameters = sum(parameter.numel() for parameter in loaded.module.parameters())
    if config.compile == "off":
        return "compile is off"
    obstacle = why_not_cpu(config.attention, loaded.device, loaded.layout)
    if obstacle is not None:
        return f"packages require attention in C++, but {obstacle}"
    if config.compile == "auto" and parameters < MIN_PARAMETERS:
        return f"compiling pays off from {MIN_PARAMETERS:,} parameters, this model has {parameters:,}"
    if config.compile == "auto" and parameters > MAX_PARAMETERS and has_own_weights(loaded.module):
        return f"its {parameters:,} parameters would be in memory twice; compile=wait accepts that"
    try:
        compiler()
    except NoCompiler as exc:
        return str(exc)
    return None


def _package_path(loaded: LoadedModel, config: EngineConfig, state_dir: Path) -> Path:
    facts = {
        "format": FORMAT,
        "model": loaded.layout.model,
        "dtype": config.model_dtype,
        "kv_dtype": loaded.layout.dtype,
        "embeds": loaded.pooling is not None,
        "page_size": config.page_size,
        "max_step_tokens": config.step_size("cpu").tokens,
        "kernels": source_texts(kernel_sources()),  # a package runs only with the same kernels
        "adapted": loaded.adapters.layers,  # each adapted layer adds an operator to the graph
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "processor": processor(),
    }
    return state_dir.expanduser() / "compile" / f"{fingerprint(facts)}.package"


def _build(job: Job) -> None:
    """Raises: OSError, CompilationFailed."""
    package = Path(job.package)
    if _mark_used(package):  # its directory may be read-only
        return
    with locked(package):
        if not _mark_used(package):
            _run_child(job, package.with_suffix(UNFINISHED) / "inductor")
            _forget_old(package.parent)


def _mark_used(package: Path) -> bool:
    """Return False if the package does not exist."""
    try:
        os.utime(package)
    except FileNotFoundError:
        return False
    except OSError:
        log.debug("a package cannot be marked as used", extra={"package": str(package)})
    return package.is_dir()


def _run_child(job: Job, cache_dir: Path) -> None:
    command = [sys.executable, "-m", "engine.compilation.build_package", job.dump()]
    env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache_dir)}
    with subprocess.Popen(
        command, env=env, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as child:
        assert child.stderr is not None
        errors = child.stderr.read().decode(errors="replace").strip()
    if child.returncode != 0:
        raise CompilationFailed(
            errors.splitlines()[-1] if errors else f"the compiling process ended with {child.returncode}"
        )


def _forget_old(directory: Path) -> None:
    """Remove old packages and those of killed processes, because each may be as large as its model."""
    packages = sorted(directory.glob("*.package"), key=lambda path: path.stat().st_mtime, reverse=True)
    left = [path for path in directory.glob(f"*{UNFINISHED}") if path.stat().st_mtime < time.time() - LEFT_AFTER_S]
    for path in [*packages[KEPT_PACKAGES:], *left]:
        shutil.rmtree(path, ignore_errors=True)
