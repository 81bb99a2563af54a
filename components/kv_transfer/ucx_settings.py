"""UCX settings that NIXL needs, as environment variables that the operator has not set."""

import fcntl
import logging
import os
import socket
import struct
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

UCX_DEVICES: Final = "UCX_NET_DEVICES"
UCX_MODULES: Final = "UCX_MODULES"
UCX_USER_TIMEOUT: Final = "UCX_TCP_USER_TIMEOUT"
UCX_IPC_CACHE: Final = "UCX_CUDA_IPC_CACHE"
UNANSWERED: Final = "5s"  # before a connection with unacknowledged bytes is dropped
NO_RDMA: Final = "^ib"  # all modules but this one
_GET_ADDRESS: Final = 0x8915  # SIOCGIFADDR of Linux


def choose_devices(host: str) -> None:
    """Restrict UCX to the interface of `host`, and to RDMA devices unless that is loopback.

    UCX listens on all interfaces by default, and a few bytes sent to its port can crash the process.
    """
    if os.environ.get(UCX_DEVICES):
        return
    name = _interface(host)
    if name is None:
        log.warning(
            "no interface has the address for KV transfer, so NIXL listens on all; set MESH_KV_TRANSFER_HOST",
            extra={"host": host},
        )
        return
    devices = [name] if ip_address(host).is_loopback else [name, *_rdma_devices()]
    os.environ[UCX_DEVICES] = ",".join(devices)


def leave_out_rdma() -> None:
    """Keep UCX's RDMA module out where no RDMA device exists.

    The module of nixl 1.5.1 ends an exiting process with SIGSEGV on Debian 12.
    """
    if not _rdma_devices():
        os.environ.setdefault(UCX_MODULES, NO_RDMA)


def drop_dead_connections() -> None:
    """Make the kernel close a connection whose peer is unreachable, and drop its unacknowledged bytes.

    By default it resends them for 15 minutes, so they could land after decode has reused its pages.
    """
    os.environ.setdefault(UCX_USER_TIMEOUT, UNANSWERED)


def unmap_after_writes() -> None:
    """Make UCX unmap a peer's GPU memory when no write is in flight.

    By default it stays mapped, and a mapping keeps a killed peer's memory allocated, so a restart on the same GPU would find
    none free. The first peer on each GPU stays mapped until it is disconnected.
    """
    os.environ.setdefault(UCX_IPC_CACHE, "n")


def _interface(host: str) -> str | None:
    with suppress(ValueError):
        if ip_address(host).is_loopback:
            return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                answer = fcntl.ioctl(probe, _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == host:
                    return name
    return None


def _rdma_devices() -> list[str]:
    """`<device>:<port>` of each InfiniBand or RoCE port."""
    return sorted(f"{port.parent.parent.name}:{port.name}" for port in Path("/sys/class/infiniband").glob("*/ports/*"))
