"""Bind a listening socket, and later refuse new connections on it."""

import contextlib
import ctypes
import errno
import os
import select
import socket
import struct
from typing import Final

from components.startup import CannotServe

BACKLOG: Final = 2048
SEND_BUFFER_BYTES: Final = 256 * 1024  # per connection; the kernel allocates twice that
SO_ATTACH_FILTER: Final = 26  # Linux's; not in Python
# Classic BPF, from the TCP header on: load the flags; drop the packet if SYN is set; else accept it.
NO_NEW_CONNECTION: Final = (
    (0x30, 0, 0, 13),
    (0x45, 0, 1, 0x02),
    (0x06, 0, 0, 0),
    (0x06, 0, 0, 0xFFFFFFFF),
)
ADVICE: Final = {  # {} is an option's name without its last word, `host` or `port`
    errno.EADDRINUSE: "stop the process that uses the address, or choose another with {}port",
    errno.EADDRNOTAVAIL: "this machine does not have this address; give {}host one that it has, or 0.0.0.0 for all",
    errno.EACCES: "ports below 1024 need root; choose another with {}port",
}
OTHER_ADVICE: Final = "choose another {0}host or {0}port"


def bind(host: str, port: int, *, share_port: bool, options: str = "--") -> socket.socket:
    """`options`: how both options' names begin, for an error. Raises: CannotServe."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if share_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # inherited by accepted sockets; a client waits for each token
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        listener.bind((host, port))
        listener.listen(BACKLOG)  # only this reserves the port: two sockets may bind it
    except (OSError, UnicodeError) as exc:
        listener.close()
        raise CannotServe(cannot_listen(host, port, exc, options)) from exc
    listener.setblocking(False)
    return listener


def cannot_listen(host: str, port: int, exc: OSError | UnicodeError, options: str = "--") -> str:
    at = f"cannot listen on {host}:{port}"
    if isinstance(exc, socket.gaierror | UnicodeError):  # UnicodeError: an invalid name, such as a..b
        return f"{at}: {host!r} is not an address or name of this machine; give another {options}host"
    cause = os.strerror(exc.errno) if exc.errno and exc.errno > 0 else str(exc)
    return f"{at}: {cause}; {ADVICE.get(exc.errno or 0, OTHER_ADVICE).format(options)}"


def has_connections(listener: socket.socket) -> bool:
    queue = select.poll()
    queue.register(listener, select.POLLIN)
    return bool(queue.poll(0))


def refuse_connections(listener: socket.socket) -> None:
    """Have the kernel drop packets that would open a connection here.

    Clients repeat them after a second, and another process on the port serves them. A close of the socket would reset
    connections in a handshake.
    """
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in NO_NEW_CONNECTION)
    buffer = ctypes.create_string_buffer(code)
    program = struct.pack("HP", len(NO_NEW_CONNECTION), ctypes.addressof(buffer))
    with contextlib.suppress(OSError):  # a system without socket filters
        listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)


def url_of(listener: socket.socket, scheme: str) -> str:
    host, port = listener.getsockname()[:2]
    shown = "127.0.0.1" if host in {"0.0.0.0", "::"} else f"[{host}]" if ":" in host else host  # noqa: S104
    return f"{scheme}://{shown}:{port}"
