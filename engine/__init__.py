"""The engine. Importing it bounds how long OpenMP's threads spin, because libgomp reads the bound when torch loads it."""

import os
from typing import Final

# A thread that spins at a barrier takes its core from the thread it waits for, if other processes use the cores. By default
# libgomp's threads spin for milliseconds, so a decode step beside one busy process took 200 times as long. This bound is about
# 70 µs. On a quiet machine the threads of a step wait no longer for each other, so steps there are as fast as by default.
SPINS: Final = "3000"

if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
