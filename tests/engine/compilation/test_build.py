"""The compiling process beside others."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

STEPPING_BACK = """
import os
from pathlib import Path
from engine.compilation.build import _step_back
_step_back()
print(os.nice(0), os.getsid(0) == os.getpid(), Path("/proc/self/autogroup").read_text())
"""


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="this kernel does not schedule by sessions")
def test_a_compiler_steps_back_in_every_session_but_its_own_too() -> None:
    ours = Path("/proc/self/autogroup").read_text()
    done = subprocess.run([sys.executable, "-c", STEPPING_BACK], capture_output=True, text=True, check=True)
    nice, leads, group = done.stdout.split(maxsplit=2)
    assert int(nice) == 19
    assert leads == "True"
    assert group.split()[-1] == "19"
    assert Path("/proc/self/autogroup").read_text() == ours
    assert os.nice(0) < 19
