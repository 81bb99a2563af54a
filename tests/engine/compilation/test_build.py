"""The compiling process beside others."""

import os
import subprocess
import sys
from inspect import getsource
from pathlib import Path

from engine.compilation.build_package import _lower_priority

AUTOGROUP = Path("/proc/self/autogroup")  # where the kernel schedules by sessions
STEPPING_BACK = f"""
import os
from contextlib import suppress
from pathlib import Path
{getsource(_lower_priority)}  # without its module, which loads torch
_lower_priority()
group = Path("/proc/self/autogroup")
print(os.nice(0), os.getsid(0) == os.getpid(), group.read_text() if group.exists() else "")
"""


def test_a_compiler_steps_back_in_every_session_but_its_own_too() -> None:
    ours = _priorities()
    done = subprocess.run([sys.executable, "-c", STEPPING_BACK], capture_output=True, text=True, check=True)
    nice, leads, *group = done.stdout.split()
    assert int(nice) == 19
    assert leads == "True"
    assert group[-1:] == (["19"] if AUTOGROUP.exists() else [])
    assert _priorities() == ours


def _priorities() -> tuple[int, str]:
    return os.nice(0), AUTOGROUP.read_text() if AUTOGROUP.exists() else ""
