import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.waiting import PATIENCE_S


def test_ctrl_c_while_modules_are_imported_prints_nothing(tmp_path: Path) -> None:
    """It printed a traceback of the module that was being imported."""
    slow = "import sys\nprint('importing', flush=True)\nsys.stdin.read()\n"
    (tmp_path / "typer.py").write_text(slow)
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)  # an ignored signal would be inherited
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "services.local"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
        )
    finally:
        signal.signal(signal.SIGINT, earlier)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert errors == ""
    assert process.returncode == -signal.SIGINT
