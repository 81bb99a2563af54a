"""What to do about an address on which a process cannot listen."""

import errno
import os
import socket
from typing import Final

ADVICE: Final = {
    errno.EADDRINUSE: "stop what uses the address, or choose another with --port",
    errno.EADDRNOTAVAIL: "this machine does not have this address: give --host one that it has, or 0.0.0.0 for all",
    errno.EACCES: "ports below 1024 are for root: choose another with --port",
}


def cannot_listen(host: str, port: int, exc: OSError) -> str:
    """One line: where, why, and what helps against this error."""
    at = f"cannot listen on {host}:{port}"
    if isinstance(exc, socket.gaierror):
        return f"{at}: {host!r} is no address of this machine, and no name of one; give another --host"
    cause = os.strerror(exc.errno) if exc.errno and exc.errno > 0 else str(exc)
    return f"{at}: {cause}; {ADVICE.get(exc.errno or 0, 'choose another --host or --port')}"
