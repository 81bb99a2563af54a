"""The engine. Importing it bounds how long OpenMP's threads spin, because libgomp reads the bound when torch loads it."""

import os
from typing import Final

# A thread that spins at a barrier takes its core from the thread it waits for, if other processes use the cores. libgomp's
# default of some milliseconds makes a decode step with one busy neighbour 200 times as long. This is about 70 µs: as long as
# the threads of one step wait for each other on a quiet machine, so decodes there are as fast as with the default.
SPINS: Final = "3000"

if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
