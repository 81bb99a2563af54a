"""The transports that a worker reports, with real sockets and a real mapped segment."""

import mmap
import socket
import sys
from pathlib import Path
from subprocess import PIPE, Popen

import pytest

from components.kv_transfer import open_sockets
from components.kv_transfer.open_sockets import observed_transport
from components.wire.status import Connection

_MAP_AND_CLOSE = """
import mmap, sys
def seen():
    print(flush=True)
    input()
seen()
with open(sys.argv[1], "r+b") as opened, mmap.mmap(opened.fileno(), 0):
    seen()
seen()
"""


def test_listeners_and_connections_of_this_process_are_seen_and_no_others() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert port in observed_transport().ports
        with socket.create_connection(("127.0.0.1", port)) as client:
            server, (_, of_client) = listener.accept()
            with server:
                assert client.getsockname()[1] == of_client
                connections = observed_transport().connections
                assert Connection(local=of_client, remote=port) in connections
                assert Connection(local=port, remote=of_client) in connections
    seen = observed_transport()
    assert port not in seen.ports
    assert not [one for one in seen.connections if port in (one.local, one.remote)]


def test_a_segment_that_is_mapped_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs its own process, as agents of other tests map segments here."""
    file = tmp_path / "ucx_shm_posix_1"
    file.write_bytes(b"\0" * mmap.PAGESIZE)
    with Popen([sys.executable, "-c", _MAP_AND_CLOSE, file], stdin=PIPE, stdout=PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        monkeypatch.setattr(open_sockets, "SELF", Path(f"/proc/{process.pid}"))
        seen = []
        for _ in range(3):
            process.stdout.readline()
            seen.append(observed_transport())
            process.stdin.write("\n")
            process.stdin.flush()
    assert [one.shared_memory for one in seen] == [False, True, False]
    assert not any(one.rdma for one in seen)


def test_many_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_sockets, "MAX_CONNECTIONS", 1)
    pairs = [socket.socketpair(socket.AF_UNIX) for _ in range(3)]  # no TCP: not counted
    with socket.create_server(("127.0.0.1", 0)) as listener:
        clients = [socket.create_connection(listener.getsockname()) for _ in range(3)]
        assert len(observed_transport().connections) == 1
    for one in (*clients, *(end for pair in pairs for end in pair)):
        one.close()
