"""The C++ attention kernel: compiled once for this machine, a few seconds, then loaded into the process."""

import logging
import os
import subprocess
from pathlib import Path
from typing import Final

import torch
from torch.utils.cpp_extension import include_paths, library_paths

from engine.compilation.machine import compiler, fingerprint, making, processor

log = logging.getLogger(__name__)

SOURCE: Final = Path(__file__).with_name("native.cpp")
# Sums may be taken in any order, which vectors need. Not -ffast-math: a library linked with that changes how the whole
# process rounds numbers near zero.
FLAGS: Final = (
    *("-std=c++20", "-O3", "-march=native", "-shared", "-fPIC", "-fopenmp-simd"),
    *("-fassociative-math", "-freciprocal-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno"),
)


class KernelUnavailable(Exception):
    """There is no compiled kernel on this machine; the message tells why."""


def load_kernel(state_dir: Path) -> None:
    """Have `torch.ops.kvmesh.attend_pages` in this process; a second call does nothing. Raises: KernelUnavailable."""
    if kernel_is_loaded():
        return
    cxx = compiler()
    if cxx is None:
        raise KernelUnavailable("there is no C++ compiler: install g++ or set CXX")
    facts = {"source": SOURCE.read_text(), "flags": FLAGS, "torch": torch.__version__, "processor": processor()}
    library = state_dir.expanduser() / "compile" / f"attention-{fingerprint(facts)}.so"
    try:
        with making(library):
            if not library.exists():
                _compile(cxx, library)
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
    except OSError as exc:
        raise KernelUnavailable(f"{library} cannot be made or loaded: {exc}") from exc
    torch.library.register_fake("kvmesh::attend_pages", _like_output)


def kernel_is_loaded() -> bool:
    """Whether this process has the kernel."""
    return hasattr(torch.ops.kvmesh, "attend_pages")


def _compile(cxx: str, library: Path) -> None:
    log.info("compiling the attention kernel", extra={"library": str(library)})
    unfinished = library.with_name(f"{library.stem}-{os.getpid()}.so")
    includes = [f"-I{path}" for path in include_paths()]
    libraries = [f"-L{path}" for path in library_paths()]
    command = [cxx, *FLAGS, *includes, str(SOURCE), "-o", str(unfinished), *libraries, "-ltorch_cpu"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
            raise KernelUnavailable(f"{cxx} cannot compile it: {errors[0] if errors else done.returncode}")
        unfinished.replace(library)
    finally:
        unfinished.unlink(missing_ok=True)


def _like_output(query: torch.Tensor, *_others: object) -> torch.Tensor:
    """[1, T, heads, head_dim], contents undefined."""
    return query.new_empty(1, query.shape[2], query.shape[1], query.shape[3])
