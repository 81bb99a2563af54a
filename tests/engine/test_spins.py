"""The bound on spins of OpenMP's threads, as libgomp reports it."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import engine

# Loads only libgomp, when torch would load it: torch takes many seconds on a busy machine.
UP_TO_TORCH = """
import ctypes, sys

class LibgompAlone:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            ctypes.CDLL(sys.argv[1])
            sys.exit()

sys.meta_path.insert(0, LibgompAlone())
"""
# A worker's main module is imported first, as when it is started by hand; it loads torch later.
WORKER = "import services.decode.__main__, engine.build"


def reported(given: dict[str, str], imports: str) -> str:
    """Return libgomp's report, with `given` in the environment, after these imports up to torch."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    libgomp = next((Path(spec.origin).parent / "lib").glob("libgomp*"))
    own = {name: value for name, value in os.environ.items() if name not in {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}}
    done = subprocess.run(
        [sys.executable, "-c", UP_TO_TORCH + imports, str(libgomp)],
        env=own | given | {"OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stderr


def test_a_worker_started_by_hand_bounds_spins_before_libgomp_is_loaded() -> None:
    """Without a bound, decode's threads spun for whole time slices."""
    assert f"GOMP_SPINCOUNT = '{engine.SPINS}'" in reported({}, WORKER)


@pytest.mark.parametrize(("given", "spins"), [({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "passive"}, "0")])
def test_a_bound_in_the_environment_wins(given: dict[str, str], spins: str) -> None:
    assert f"GOMP_SPINCOUNT = '{spins}'" in reported(given, "import engine, torch")
