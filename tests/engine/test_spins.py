"""How long OpenMP's threads spin: libgomp itself says with what it was loaded."""

import os
import subprocess
import sys

import pytest

import engine

# A worker's main module is there first, as when it is started by hand; it loads torch later.
LOADED = "import services.decode.__main__, engine.build"


@pytest.mark.parametrize(
    ("given", "spins"), [({}, engine.SPINS), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, "0")]
)
def test_a_worker_started_by_hand_bounds_spins_before_libgomp_is_loaded(given: dict[str, str], spins: str) -> None:
    """`services.local` set a bound for prefill alone: decode's threads spun their whole time slices away."""
    own = {name: value for name, value in os.environ.items() if name not in {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}}
    done = subprocess.run(
        [sys.executable, "-c", LOADED],
        env=own | given | {"OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"GOMP_SPINCOUNT = '{spins}'" in done.stderr
