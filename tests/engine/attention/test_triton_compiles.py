"""Compiles the kernels: the interpreter accepts changing types in loops and blocks that do not fit."""

import os
import subprocess
import sys
from pathlib import Path

SHARED_BYTES = 227 * 1024  # of a Hopper multiprocessor, for one block
SCRIPT = Path(__file__).with_name("compile_for_hopper.py")


def test_kernels_compile_for_a_hopper_gpu_fit_into_its_shared_memory_and_spill_nothing(tmp_path: Path) -> None:
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(Path.cwd())}
    done = subprocess.run([sys.executable, SCRIPT], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    assert {line[0] for line in lines} == {"decode_kernel", "join_kernel", "prompt_kernel", "write_kernel"}
    assert len(lines) == 23
    assert all(int(shared) <= SHARED_BYTES for _, shared, _, _ in lines), done.stdout
    assert all(spilled == "0" for *_, spilled in lines), done.stdout
