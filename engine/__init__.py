"""The engine. Importing it limits OpenMP's spinning, before torch loads libgomp."""

import os
from typing import Final

# About 70 µs. With libgomp's default, steps beside a busy process took 200 times as long: a spinning thread keeps the
# core that another needs.
SPINS: Final = "3000"

if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
