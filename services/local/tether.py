"""Run a command that dies with the process that started it: `python -I -S tether.py <parent pid> <command …>`.

A separate step before exec, and not `preexec_fn`, because Python code between fork and exec may deadlock when the
parent has threads. Linux sends the signal when the parent *thread* ends; `process.spawn` starts from the main thread.
Standard library only: it runs isolated, so that it costs some ten milliseconds and then is the command itself.
"""

import ctypes
import os
import signal
import sys


def main() -> None:
    """Ask the kernel for SIGKILL at the parent's death, then become the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        if ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0) != 0:
            sys.exit(f"tether: prctl: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:  # died before prctl: no signal will come
        sys.exit("tether: the parent is gone")
    try:
        os.execv(command[0], command)  # noqa: S606  # becoming the command is the point
    except OSError as exc:
        sys.exit(f"{command[0]}: {exc.strerror}")


if __name__ == "__main__":
    main()
