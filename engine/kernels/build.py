"""The C++ kernels: compiled once for this machine, a few seconds, then loaded into the process."""

import logging
import os
import subprocess
from pathlib import Path
from typing import Final

import torch
from torch.utils.cpp_extension import include_paths, library_paths

from engine.compilation.machine import NoCompiler, compiler, fingerprint, making, processor

log = logging.getLogger(__name__)

SOURCES: Final = tuple(Path(__file__).with_name(name) for name in ("attention.cpp", "linear.cpp"))
# Sums may be taken in any order, which vectors need. Not -ffast-math: a library linked with that changes how the whole
# process rounds numbers near zero.
FLAGS: Final = (
    *("-std=c++20", "-O3", "-march=native", "-shared", "-fPIC", "-fopenmp-simd"),
    *("-fassociative-math", "-freciprocal-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno"),
)


class KernelsUnavailable(Exception):
    """There are no compiled kernels on this machine; the message tells why."""


def load_kernels(state_dir: Path) -> None:
    """Have the operators in this process: attend_pages and, where the processor can, those of linear.cpp.

    Called again, it does nothing.

    Raises: KernelsUnavailable.
    """
    if kernels_are_loaded():
        return
    try:
        cxx = compiler()
    except NoCompiler as exc:
        raise KernelsUnavailable(str(exc)) from exc
    facts = {"source": sources(), "flags": FLAGS, "torch": torch.__version__, "processor": processor()}
    library = state_dir.expanduser() / "compile" / f"kernels-{fingerprint(facts)}.so"
    try:
        with making(library):
            if not library.exists():
                _compile(cxx, library)
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
    except OSError as exc:
        raise KernelsUnavailable(f"{library} cannot be made or loaded: {exc}") from exc
    torch.library.register_fake("kvmesh::attend_pages", _like_attended)
    if hasattr(torch.ops.kvmesh, "linear"):
        torch.library.register_fake("kvmesh::linear", _like_product)
        torch.library.register_fake("kvmesh::gated_linear", _like_gated)


def sources() -> list[str]:
    """The text of the kernels: what was compiled with other kernels may not run with these."""
    return [path.read_text() for path in SOURCES]


def kernels_are_loaded() -> bool:
    """Whether this process has them."""
    return hasattr(torch.ops.kvmesh, "attend_pages")


def _compile(cxx: str, library: Path) -> None:
    log.info("compiling the kernels", extra={"library": str(library)})
    unfinished = library.with_name(f"{library.stem}-{os.getpid()}.so")
    includes = [f"-I{path}" for path in include_paths()]
    libraries = [f"-L{path}" for path in library_paths()]
    command = [cxx, *FLAGS, *includes, *map(str, SOURCES), "-o", str(unfinished), *libraries, "-ltorch_cpu"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
            raise KernelsUnavailable(f"{cxx} cannot compile them: {errors[0] if errors else done.returncode}")
        unfinished.replace(library)
    finally:
        unfinished.unlink(missing_ok=True)


def _like_attended(query: torch.Tensor, *_others: object) -> torch.Tensor:
    """[1, T, heads, head_dim], contents undefined."""
    return query.new_empty(1, query.shape[2], query.shape[1], query.shape[3])


def _like_product(x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """[..., out], contents undefined."""
    return x.new_empty(*x.shape[:-1], packed.shape[0] * packed.shape[2])


def _like_gated(x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """[..., out], contents undefined."""
    return x.new_empty(*x.shape[:-1], packed.shape[0] * packed.shape[2] // 2)
