"""The engine. Importing it bounds OpenMP's spinning, which libgomp reads when torch loads it."""

import os
from typing import Final

# A spinning thread takes the core of the thread that it waits for, if other processes use the cores. libgomp spins
# for milliseconds by default, so a step beside one busy process took 200 times as long. About 70 µs are enough on a
# quiet machine.
SPINS: Final = "3000"

if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
