"""Facts of the machine that compiled code depends on."""

import fcntl
import hashlib
import json
import os
import platform
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import torch


class NoCompiler(Exception):
    pass


def compiler() -> str:
    name = os.environ.get("CXX", "g++")
    path = shutil.which(name)
    if path is None:
        raise NoCompiler(f"there is no C++ compiler {name}: install it or set CXX")
    return path


def processor() -> str:
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {_flags()}"


def _flags() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def set_compile_caches(state_dir: Path) -> None:
    """Keep compiled kernels out of /tmp, which a container loses at each start."""
    home = state_dir.expanduser() / "compile"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(home / "inductor"))
    os.environ.setdefault("TRITON_CACHE_DIR", str(home / "triton"))


def fingerprint(facts: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def sync_to_disk(file: IO[bytes]) -> None:
    """Flush a file, because a library truncated by a power failure can kill each process that loads it."""
    file.flush()
    os.fsync(file.fileno())


@contextmanager
def locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
