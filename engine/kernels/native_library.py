"""Compiles this package's C++ once per machine, and loads it."""

import logging
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch
from torch.utils.cpp_extension import include_paths, library_paths

from engine.cpu.machine import NoCompiler, compiler, fingerprint, locked, processor, sync_to_disk
from engine.kernels.operators import like_attended

log = logging.getLogger(__name__)

HERE: Final = Path(__file__).parent
SHARED: Final = ("-std=c++20", "-shared", "-fPIC")
# Vectorising needs reordered sums. Linking with -ffast-math would change denormals for the whole process.
FAST: Final = (
    *("-O3", "-march=native", "-fopenmp-simd"),
    *("-fassociative-math", "-freciprocal-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno"),
)


class KernelsUnavailable(Exception):
    pass


def load_kernels(state_dir: Path) -> None:
    """Load the operators; those of linear.cpp only if the processor supports them. Raises: KernelsUnavailable."""
    if kernels_are_loaded():
        return
    _load("kernels", kernel_sources(), FAST, ("torch_cpu",), state_dir, torch.ops.load_library)
    torch.library.register_fake("kvmesh::attend_pages", like_attended)
    if hasattr(torch.ops.kvmesh, "linear"):
        torch.library.register_fake("kvmesh::linear", _like_product)
        torch.library.register_fake("kvmesh::gated_linear", _like_gated)
        torch.library.register_fake("kvmesh::logits", _like_logits)


def load_package_class(state_dir: Path) -> None:
    """Load `torch.classes.kvmesh_package.Package`, once. Raises: KernelsUnavailable."""
    try:
        torch.classes.kvmesh_package.Package  # noqa: B018 - the only way to check for it
    except RuntimeError:
        pass
    else:
        return
    libraries = ("torch", "torch_cpu", "c10")
    _load("package", [HERE / "package.cpp"], ("-O1",), libraries, state_dir, torch.classes.load_library)


def kernel_sources() -> list[Path]:
    return [HERE / "attention.cpp", HERE / "linear.cpp", HERE / "cores.cpp", HERE / "noise.cpp"]


def source_texts(sources: Sequence[Path]) -> list[str]:
    """Return the sources and all headers."""
    return [path.read_text() for path in [*sources, *sorted(HERE.glob("*.h"))]]


def kernels_are_loaded() -> bool:
    return hasattr(torch.ops.kvmesh, "attend_pages")


def _load(  # noqa: PLR0917 - a compiler's command line, in its order
    name: str,
    sources: Sequence[Path],
    flags: Sequence[str],
    libraries: Sequence[str],
    state_dir: Path,
    load: Callable[[str], object],
) -> None:
    facts = {
        "source": source_texts(sources),
        "flags": [*SHARED, *flags],
        "torch": torch.__version__,
        "processor": processor(),
    }
    library = state_dir.expanduser() / "compile" / f"{name}-{fingerprint(facts)}.so"
    try:
        if _is_loaded(library, load):  # its directory may be read-only
            return
        cxx = compiler()
        with locked(library):
            if not _is_loaded(library, load):
                log.info("compiling C++", extra={"library": str(library)})
                links = [*(f"-L{path}" for path in library_paths()), *(f"-l{library}" for library in libraries)]
                _compile(
                    [cxx, *SHARED, *flags, *(f"-I{path}" for path in include_paths()), *map(str, sources)],
                    links,
                    library,
                )
                load(str(library))
    except NoCompiler as exc:
        raise KernelsUnavailable(str(exc)) from exc
    except OSError as exc:
        raise KernelsUnavailable(f"{library} cannot be made or loaded: {exc.__cause__ or exc}") from exc


def _is_loaded(library: Path, load: Callable[[str], object]) -> bool:
    """Load a library, unless it is missing, damaged, or built for another libc."""
    if not library.exists():
        return False
    try:
        load(str(library))
    except OSError as exc:
        log.warning(
            "compiled C++ cannot be loaded", extra={"library": str(library), "reason": str(exc.__cause__ or exc)}
        )
        return False
    return True


def _compile(command: Sequence[str], links: Sequence[str], library: Path) -> None:
    """Create `library` by a rename."""
    unfinished = library.with_name(f"{library.stem}-{os.getpid()}.so")
    try:
        env = os.environ | {"LC_ALL": "C"}  # for errors in English
        done = subprocess.run(
            [*command, "-o", str(unfinished), *links], capture_output=True, text=True, check=False, env=env
        )
        if done.returncode != 0:
            cause = _first_error(done.stderr.splitlines()) or done.returncode
            raise KernelsUnavailable(f"{command[0]} cannot compile them (use g++ 12 or newer, set CXX): {cause}")
        with unfinished.open("rb") as file:
            sync_to_disk(file)
        unfinished.replace(library)
    finally:
        unfinished.unlink(missing_ok=True)


def _first_error(lines: Sequence[str]) -> str:
    at = next((at for at, line in enumerate(lines) if "error" in line), 0)
    if at > 0 and lines[at].startswith("collect2:"):  # it only counts the linker's errors
        at -= 1
    return lines[at] if lines else ""


def _like_product(x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], packed.shape[0] * packed.shape[2])


def _like_logits(x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    return _like_product(x, packed).float()


def _like_gated(x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], packed.shape[0] * packed.shape[2] // 2)
