"""`python -I -S tether.py PARENT_PID COMMAND …`: become a command that dies with the process that started it.

No `preexec_fn`: Python code between fork and exec may deadlock if the parent has threads. Only the standard library is
imported, so that the start takes ten milliseconds.
"""

import ctypes
import os
import signal
import sys


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        if ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0) != 0:
            sys.exit(f"tether: prctl: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:  # it died before prctl: no signal will come
        sys.exit("tether: the parent has ended")
    try:
        os.execv(command[0], command)  # noqa: S606  # becoming the command is the point
    except OSError as exc:
        sys.exit(f"{command[0]}: {exc.strerror}")


if __name__ == "__main__":
    main()
