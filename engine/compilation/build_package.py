"""Compiles a model's forward to a package, in its own process: `python -m engine.compilation.build_package`.

A package loads in 10 ms, and its trial takes 0.3 s. Compiling SmolLM2-135M takes 42 s, or 100 s without AVX-512.
"""

import json
import os
import platform
import shutil
import sys
import threading
import zipfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch
from pydantic import TypeAdapter

from engine.compilation.forward import LIBRARY, MIN_TOKENS, Exported, has_own_weights
from engine.compilation.trial import scratch_attention, step_of
from engine.config import EngineConfig
from engine.cpu.machine import sync_to_disk
from engine.kernels.linear import pack_linears
from engine.kernels.native_library import load_kernels
from engine.kernels.shared_linear import merge_products, share_linears
from engine.model.load import LoadedModel, load_model
from engine.model.progress import silent

ENOUGH: Final = 1024  # elements, in the example, from which a loop is divided between threads
ONCE: Final = {
    "aot_inductor.precompile_headers": False,  # they take 7 s and 290 MB in /tmp, and only help the next package
    # PyPI's torch has the functions that inductor would check for by compiling four libraries, which takes 8 s.
    "cpp.vec_isa_ok": platform.machine() == "x86_64" or None,
    # Inductor divides a loop only if each of this machine's cores would get this many elements. Its default would divide
    # none on 64 cores.
    "cpp.min_chunk_size": max(1, ENOUGH // (os.cpu_count() or 1)),
}
OWN_WEIGHTS: Final = ONCE | {"freezing": True}  # weights are folded in and packed
NO_WEIGHTS: Final = ONCE | {"always_keep_tensor_constants": True, "aot_inductor.package_constants_in_so": False}
EXAMPLE: Final = 8  # tokens
UNFINISHED: Final = ".unfinished"  # suffix of a package's directory


@dataclass(frozen=True, slots=True)
class Job:
    """The compiling process's argument, as JSON."""

    model: str
    state_dir: str
    package: str
    config: EngineConfig

    def dump(self) -> str:
        return json.dumps(asdict(self), default=str)


def build_package(loaded: LoadedModel, path: Path, max_tokens: int) -> None:
    """Compile for steps of up to `max_tokens` tokens. The directory `path` is created by a rename."""
    step = step_of(scratch_attention(loaded.layout, EXAMPLE), loaded.layout, EXAMPLE, EXAMPLE)
    example = torch.zeros(EXAMPLE, dtype=torch.int64), torch.arange(EXAMPLE), torch.arange(4), step.pool, step.plan
    tokens = torch.export.Dim("tokens", min=MIN_TOKENS, max=max_tokens)
    kept = torch.export.Dim("kept", min=MIN_TOKENS, max=max_tokens)
    sizes = tokens, tokens, kept, torch.export.Dim("pages", min=2), torch.export.Dim("plan", min=2)
    share_linears(loaded.module)
    own = has_own_weights(loaded.module)
    with torch.no_grad():
        program = torch.export.export(
            Exported(loaded.module),
            example,
            dynamic_shapes=tuple({0: size} for size in sizes),
            strict=False,
        )
        merge_products(program.graph)
        unfinished = path.with_suffix(UNFINISHED)
        shutil.rmtree(unfinished, ignore_errors=True)  # left by a killed process, as only one builds at a time
        unfinished.mkdir()
        archive, package = unfinished / "archive.pt2", unfinished / "package"
        try:
            torch._inductor.aoti_compile_and_package(
                program, package_path=str(archive), inductor_configs=OWN_WEIGHTS if own else NO_WEIGHTS
            )
            _unpack(archive, package)
            package.rename(path)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


def _unpack(archive: Path, package: Path) -> None:
    """Extract the library and its list of operators, which torch expects under the same name."""
    package.mkdir()
    with zipfile.ZipFile(archive) as members:
        for member in members.namelist():
            if member.endswith((".wrapper.so", ".wrapper.json")):
                target = (package / LIBRARY).with_suffix(Path(member).suffix)
                with members.open(member) as source, target.open("wb") as file:
                    shutil.copyfileobj(source, file)
                    sync_to_disk(file)


def main() -> None:
    _lower_priority()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    job = TypeAdapter(Job).validate_json(sys.argv[1])
    torch.set_num_threads(os.cpu_count() or 1)  # generated loops use the number set when they run
    loaded = load_model(job.model, job.config, Path(job.state_dir), silent)
    load_kernels(Path(job.state_dir))
    pack_linears(loaded.module)
    build_package(loaded, Path(job.package), job.config.step_size("cpu").tokens)


def _lower_priority() -> None:
    """Use only idle cores."""
    os.nice(19)
    # with autogroup, `nice` only applies within a session: a worker of the same one took 1 s per token, not 30 ms
    with suppress(OSError):  # already a session leader, or a kernel without autogroup
        os.setsid()
        Path("/proc/self/autogroup").write_text("19")


def _end_with_parent() -> None:
    """Exit when the pipe from the parent ends."""
    os.read(sys.stdin.fileno(), 1)  # not through sys.stdin, whose lock would block the exit
    os._exit(1)


if __name__ == "__main__":
    main()
