"""Several hosts on one machine: network namespaces, each with two interfaces, joined by a switch with faulty links.

Needs root, iproute2 and /dev/net/tun.
"""

import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.hosts.switch import NAMESPACES, enter
from tests.waiting import PATIENCE_S

REPO: Final = Path(__file__).resolve().parents[2]
IP: Final = shutil.which("ip") or "ip"  # a tether needs the whole path
MTU: Final = 9_000
DEVICE: Final = "mesh0"
OTHER_DEVICE: Final = "other0"  # another network, where the mesh may not listen
NETWORK: Final = "10.77.0"
OTHER_NETWORK: Final = "10.78.0"


def cannot_run() -> str:
    """Return why hosts cannot be made here, or an empty text."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "no ip command: apt install iproute2"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "no /dev/net/tun: load the module tun, or give the container that device"
    return ""


@dataclass(frozen=True, slots=True)
class Fault:
    """The faults of one direction of a host's link."""

    delay_s: float = 0.0
    loss: float = 0.0
    bytes_per_s: float = 0.0


WHOLE: Final = Fault()
CUT: Final = Fault(loss=1.0)


@dataclass(frozen=True, slots=True)
class Host:
    name: str
    namespace: str
    address: str
    other_address: str

    def command(self, *command: str) -> list[str]:
        """Return the command line that runs `command` on this host, with its /sys for UCX. It replaces `ip`."""
        return [IP, "netns", "exec", self.namespace, *command]

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Put sockets of this thread, and of threads and processes that it starts, on this host."""
        with Path("/proc/thread-self/ns/net").open() as before, (NAMESPACES / self.namespace).open() as own:
            enter(own.fileno())
            try:
                yield
            finally:
                enter(before.fileno())


class Hosts:
    def __init__(self, names: Sequence[str]) -> None:
        prefix = f"kvm-{secrets.token_hex(3)}"
        self.all = {
            name: Host(name, f"{prefix}-{name}", f"{NETWORK}.{i}", f"{OTHER_NETWORK}.{i}")
            for i, name in enumerate(names, start=1)
        }
        self._switch: subprocess.Popen[str]

    def __getitem__(self, name: str) -> Host:
        return self.all[name]

    @contextmanager
    def running(self) -> Iterator["Hosts"]:
        with ExitStack() as stack:
            for host in self.all.values():
                _ip("netns", "add", host.namespace)
                stack.callback(_ip, "netns", "delete", host.namespace)
            places = [f"{host.name}={host.namespace}/{DEVICE}" for host in self.all.values()]
            self._switch = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.hosts.switch", *places],
                    cwd=REPO,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            self._answer("ready")
            for host in self.all.values():
                _set_up(host)
            yield self
            self._switch.communicate(timeout=PATIENCE_S)  # closes stdin

    def fault(self, name: str, *, into: Fault = WHOLE, out: Fault = WHOLE) -> None:
        """Set the faults of a host's link."""
        assert self._switch.stdin is not None
        for way, fault in (("in", into), ("out", out)):
            line = {
                "host": name,
                "way": way,
                "delay_s": fault.delay_s,
                "loss": fault.loss,
                "bytes_per_s": fault.bytes_per_s,
            }
            self._switch.stdin.write(json.dumps(line) + "\n")
            self._switch.stdin.flush()
            self._answer("done")

    def _answer(self, expected: str) -> None:
        assert self._switch.stdout is not None
        line = self._switch.stdout.readline().strip()
        assert line == expected, f"the switch answered {line!r} and not {expected!r}"


def _set_up(host: Host) -> None:
    in_it = ("-netns", host.namespace)
    _ip(*in_it, "link", "set", "lo", "up")
    _ip(*in_it, "link", "add", OTHER_DEVICE, "type", "veth", "peer", "name", "nowhere0")
    for device, address in ((DEVICE, host.address), (OTHER_DEVICE, host.other_address)):
        _ip(*in_it, "address", "add", f"{address}/24", "dev", device)
        _ip(*in_it, "link", "set", device, "up")
    _ip(*in_it, "link", "set", DEVICE, "mtu", str(MTU))


def _ip(*arguments: str) -> None:
    subprocess.run([IP, *arguments], check=True, timeout=PATIENCE_S)
