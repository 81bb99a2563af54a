"""`python -I -S tether.py PARENT_PID COMMAND …`: become a command that dies with the process that started it.

This is not a `preexec_fn`, because Python code between fork and exec may deadlock if the parent has threads. Linux sends
the signal when the parent *thread* ends, so `process.spawn` must be called from the main thread. Only the standard
library is imported, so that the start takes about ten milliseconds.
"""

import ctypes
import os
import signal
import sys


def main() -> None:
    """Ask the kernel for SIGKILL when the parent dies, then become the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        if ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0) != 0:
            sys.exit(f"tether: prctl: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:  # it died before prctl, so no signal will come
        sys.exit("tether: the parent has ended")
    try:
        os.execv(command[0], command)  # noqa: S606  # becoming the command is the point
    except OSError as exc:
        sys.exit(f"{command[0]}: {exc.strerror}")


if __name__ == "__main__":
    main()
