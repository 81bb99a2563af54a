"""What a worker reports of the ways to its peers, with real sockets and a real mapped segment."""

import mmap
import socket
from pathlib import Path

import pytest

from components.kv_transfer import transport
from components.kv_transfer.transport import observed_transport
from components.wire.status import Connection


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


def test_a_segment_that_is_mapped_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "ucx_shm_posix_1"
    file.write_bytes(b"\0" * mmap.PAGESIZE)
    before = observed_transport()
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0):
        seen = observed_transport()
        assert seen.shared_memory
        assert seen.rdma == before.rdma
    assert observed_transport().shared_memory == before.shared_memory


def test_many_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "MOST_CONNECTIONS", 1)
    pairs = [socket.socketpair(socket.AF_UNIX) for _ in range(3)]  # no TCP: not counted
    with socket.create_server(("127.0.0.1", 0)) as listener:
        clients = [socket.create_connection(listener.getsockname()) for _ in range(3)]
        assert len(observed_transport().connections) == 1
    for one in (*clients, *(end for pair in pairs for end in pair)):
        one.close()
