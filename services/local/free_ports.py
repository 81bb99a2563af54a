"""Choose ports for servers that keep their port across restarts."""

import errno
import random
import socket
from contextlib import ExitStack
from typing import Final

# Outgoing connections use higher ports (Linux: from 32,768), and could take a server's port during its restart.
FIRST: Final = 20_000
LAST: Final = 32_000

_draw = random.SystemRandom()  # because processes with equal seeds would draw the same ports


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Choose ports on which nothing listens. Raises: OSError or UnicodeError, if this machine has no address `host`."""
    with ExitStack() as stack:  # all open at once, so they differ
        found: list[socket.socket] = []
        while len(found) < count:
            probe = stack.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
            try:
                probe.bind((host, _draw.randrange(FIRST, LAST)))
            except OSError as exc:
                if exc.errno != errno.EADDRINUSE:
                    raise
            else:
                found.append(probe)
        return [probe.getsockname()[1] for probe in found]
