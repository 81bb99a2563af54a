"""What compiled code depends on beyond its source: the processor, the compiler, the versions."""

import fcntl
import hashlib
import json
import os
import platform
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch


class NoCompiler(Exception):
    """There is no C++ compiler; the message tells what to do."""


def compiler() -> str:
    """Path of the C++ compiler, the one in CXX or g++. Raises: NoCompiler."""
    name = os.environ.get("CXX", "g++")
    path = shutil.which(name)
    if path is None:
        raise NoCompiler(f"there is no C++ compiler {name}: install it or set CXX")
    return path


def processor() -> str:
    """What generated code may use: the instruction sets, where the system lists them."""
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {_flags()}"


def has_amx() -> bool:
    """Whether the processor multiplies tiles of bfloat16 (AMX), which oneDNN does and our kernels do not."""
    return "amx_bf16" in _flags().split()


def _flags() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def keep_compiled(state_dir: Path) -> None:
    """Have torch's and Triton's compilers keep what they make under `state_dir`, unless the environment says where.

    By default that is /tmp, which a container loses at each start.
    """
    home = state_dir.expanduser() / "compile"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(home / "inductor"))
    os.environ.setdefault("TRITON_CACHE_DIR", str(home / "triton"))


def fingerprint(facts: Mapping[str, object]) -> str:
    """16 hex digits that change with any of `facts`."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


@contextmanager
def making(path: Path) -> Iterator[None]:
    """Of several processes that want `path` made, one at a time. Raises: OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
