"""A switch in user space that joins network namespaces, and the faults of its links.

Each port is a TAP device inside one namespace. Many kernels lack Linux' emulation of faulty links (netem), so the switch
delays, drops and limits frames itself. Commands are lines of JSON on stdin: `{"host": "decode",
"way": "in" | "out", "delay_s": 0.04, "loss": 0.02, "bytes_per_s": 1e6}`; each is answered by a line. It ends with stdin.

    python -m tests.hosts.switch HOST=NAMESPACE/DEVICE …
"""

import ctypes
import fcntl
import heapq
import itertools
import json
import os
import random
import select
import struct
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

NAMESPACES: Final = Path("/run/netns")
FRAME_BYTES: Final = 1 << 16
QUEUED_BYTES: Final = 1 << 20  # of a limited link; further frames are dropped
_SET_INTERFACE: Final = 0x400454CA  # TUNSETIFF of Linux
_TAP: Final = 0x0002
_NO_INFO: Final = 0x1000
_CLONE_NEWNET: Final = 0x40000000


@dataclass(slots=True)
class Link:
    """One direction of a host's link."""

    delay_s: float = 0.0
    loss: float = 0.0  # share of frames; 1: nothing passes
    bytes_per_s: float = 0.0  # 0: no limit
    free_at: float = 0.0  # time at which a limited link has sent everything

    def arrival(self, now: float, num_bytes: int) -> float | None:
        """Return when a frame that enters now leaves the link; None: never."""
        if self.loss and random.random() < self.loss:
            return None
        if not self.bytes_per_s:
            return now + self.delay_s
        begins = max(now, self.free_at)
        if (begins - now) * self.bytes_per_s > QUEUED_BYTES:
            return None
        self.free_at = begins + num_bytes / self.bytes_per_s
        return self.free_at + self.delay_s


@dataclass(slots=True)
class Port:
    tap: int  # file descriptor
    out: Link = field(default_factory=Link)  # from the host
    to: Link = field(default_factory=Link)


class Switch:
    def __init__(self, ports: dict[str, Port]) -> None:
        self._ports = ports
        self._by_tap = {port.tap: port for port in ports.values()}
        self._at: dict[bytes, Port] = {}  # by MAC address
        self._waiting: list[tuple[float, int, Port, bytes]] = []
        self._numbers = itertools.count()

    def run(self) -> None:
        poll = select.epoll()
        for fd in (0, *self._by_tap):
            poll.register(fd, select.EPOLLIN)
        while True:
            for fd, _ in poll.poll(self._patience_s()):
                if fd:
                    self._forward(self._by_tap[fd])
                elif not self._command():
                    return
            self._deliver()

    def _patience_s(self) -> float | None:
        return max(0.0, self._waiting[0][0] - time.monotonic()) if self._waiting else None

    def _forward(self, source: Port) -> None:
        frame = os.read(source.tap, FRAME_BYTES)
        self._at[frame[6:12]] = source
        known = self._at.get(frame[:6])
        targets = [known] if known else [port for port in self._ports.values() if port is not source]
        now = time.monotonic()
        for target in targets:
            left = source.out.arrival(now, len(frame))
            arrives = None if left is None else target.to.arrival(left, len(frame))
            if arrives is None:
                continue
            if arrives <= now:
                _write(target, frame)
            else:
                heapq.heappush(self._waiting, (arrives, next(self._numbers), target, frame))

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now:
            _, _, target, frame = heapq.heappop(self._waiting)
            _write(target, frame)

    def _command(self) -> bool:
        line = sys.stdin.readline()
        if not line:
            return False
        fault = json.loads(line)
        port = self._ports[fault.pop("host")]
        link = Link(**{name: value for name, value in fault.items() if name != "way"})
        if fault["way"] == "in":
            port.to = link
        else:
            port.out = link
        sys.stdout.write("done\n")
        sys.stdout.flush()
        return True


def _write(target: Port, frame: bytes) -> None:
    try:
        os.write(target.tap, frame)
    except OSError:  # the device is down
        return


def enter(namespace: int) -> None:
    """Move the calling thread into a network namespace, given as an open file. Raises: OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "cannot enter a network namespace")


def _open_tap(device: str) -> int:
    tap = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tap, _SET_INTERFACE, struct.pack("16sH22x", device.encode(), _TAP | _NO_INFO))
    return tap


def main() -> None:
    ports = {}
    for argument in sys.argv[1:]:
        host, _, place = argument.partition("=")
        namespace, _, device = place.partition("/")
        with (NAMESPACES / namespace).open() as file:
            enter(file.fileno())
        ports[host] = Port(_open_tap(device))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    Switch(ports).run()


if __name__ == "__main__":
    main()
