"""Ports for servers that keep theirs when they are restarted."""

import errno
import random
import socket
from contextlib import ExitStack
from typing import Final

# Outgoing connections have higher ports (Linux: from 32,768). One could take a server's port while that is restarted.
FIRST: Final = 20_000
LAST: Final = 32_000

_draw = random.SystemRandom()  # processes whose generators have one seed would draw the same ports


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
