"""The engine. Importing it limits OpenMP's spinning, before torch loads libgomp."""

import os
from typing import Final

# About 70 µs. With libgomp's default, spinning threads made steps beside a busy process take 200 times as long.
SPINS: Final = "3000"

if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
