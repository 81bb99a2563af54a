"""Measures KV transfers between the device memory of two processes, by NIXL."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from bench.gpu.report import Report, Target, print_figure
from bench.gpu.scale import Scale
from components.wire.layout import KvLayout

JUDGED: Final = 1024  # tokens
PAGE_SIZE: Final = 16
END_S: Final = 30.0  # time from the end of a process's input until it is killed
# UCX's names of its transports, as in its table of protocols
WAYS: Final = re.compile(
    r"\b(cuda_ipc|cuda_copy|gdr_copy|rc_mlx5|dc_mlx5|rc_verbs|ud_verbs|sysv|posix|cma|xpmem|tcp)\b"
)


class Child:
    def __init__(self, popen: "subprocess.Popen[str]") -> None:
        self._popen = popen

    def ask(self, line: str) -> Any:
        assert self._popen.stdin is not None
        self._popen.stdin.write(line + "\n")
        self._popen.stdin.flush()
        return self.read()

    def read(self) -> Any:
        assert self._popen.stdout is not None
        while line := self._popen.stdout.readline():
            if line.startswith(("{", "[", '"')):  # libraries may print, too
                return json.loads(line)
        raise SystemExit(f"a process of the transfer ended with {self._popen.wait()}")


def measure_transfer(scale: Scale, report: Report) -> bool:
    """Check the bytes and measure the speed by size, over the first connection to a peer and over a later one.

    Over a later one, UCX maps the peer's memory again for each write if UCX_CUDA_IPC_CACHE is `n`.
    """
    layout = KvLayout(
        model="bench", dtype="bfloat16", page_size=PAGE_SIZE, layers=scale.layers, kv_heads=8, head_dim=128
    )
    described, same = msgspec.json.encode(layout).decode(), True
    judged: list[float] = []
    with tempfile.TemporaryDirectory() as home, ExitStack() as stack:
        log = Path(home) / "ucx"
        ends = [
            stack.enter_context(_child(role, described, str(scale.moved_pool), scale.device, log=log))
            for role in ("receive", "send")
        ]
        receiver, sender = ends
        sender.ask(json.dumps(receiver.read()))
        for connection in ("first", "again"):
            if connection == "again":
                sender.ask("reconnect")
            for tokens in scale.moved:
                speeds, right = _moved(sender, receiver, layout, tokens)
                same = same and right
                facts = {"connection": connection, "tokens": tokens, **speeds, "same": right}
                print_figure("KV from device to device", **facts, transport=transports(log))
                if tokens == JUDGED:
                    judged.extend(speeds.values())
    if judged:
        report.record(Target.MOVED, min(judged))
    return same


def _moved(sender: Child, receiver: Child, layout: KvLayout, tokens: int) -> tuple[dict[str, float], bool]:
    """Return GB/s of neighbouring and of scattered pages, and whether the bytes are right."""
    count, speeds, same = layout.pages_for(tokens), {}, True
    for name, line in {"gb_s": f"{count}", "gb_s_scattered": f"{count} scattered"}.items():
        sent = sender.ask(line)
        same = same and receiver.ask(str(count)) == sent["digest"]
        speeds[name] = round(count * layout.page_bytes / sent["seconds"] / 1e9, 2)
    return speeds, same


def transports(log: Path) -> list[str]:
    """Return the transports of UCX's table; [] if this UCX writes none."""
    return sorted(set(WAYS.findall(log.read_text(errors="replace")))) if log.exists() else []


@contextmanager
def _child(role: str, *arguments: str, log: Path) -> Iterator[Child]:
    command = [sys.executable, "-m", "bench.gpu.transfer_end", role, *arguments]
    env = os.environ | ({"UCX_PROTO_INFO": "y", "UCX_LOG_FILE": str(log)} if role == "send" else {})
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as popen:
        try:
            yield Child(popen)
        finally:
            assert popen.stdin is not None
            popen.stdin.close()  # then it ends
            try:
                popen.wait(END_S)
            except subprocess.TimeoutExpired:
                popen.kill()
                raise
