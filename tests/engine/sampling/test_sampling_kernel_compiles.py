"""Compiles the kernel: the interpreter accepts code that the compiler refuses, and has no registers."""

import os
import subprocess
import sys
from pathlib import Path

SHARED_BYTES = 227 * 1024  # of a Hopper multiprocessor, for one block
SCRIPT = Path(__file__).with_name("compile_sampling_for_hopper.py")


def test_the_kernel_compiles_for_a_hopper_gpu_without_spills_or_fused_additions(tmp_path: Path) -> None:
    """A fused multiply-add rounds once: its noise would have other bits than the CPU's."""
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(Path.cwd())}
    done = subprocess.run([sys.executable, SCRIPT, "bfloat16"], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    _logits, shared, _registers, spills, inexact, barriers = done.stdout.split()
    assert int(shared) <= SHARED_BYTES
    assert (int(spills), int(inexact)) == (0, 0), done.stdout
    assert int(barriers) > 0
