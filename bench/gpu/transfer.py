"""KV from one process's device memory to another's, by NIXL."""

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

from bench.gpu.report import Report, Target, tell
from bench.gpu.scale import Scale
from components.wire.layout import KvLayout

JUDGED: Final = 1024  # tokens
PAGE_SIZE: Final = 16
# UCX's names of its ways, as in its table of protocols
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
    """Exact bytes, and their speed by size."""
    layout = KvLayout(
        model="bench", dtype="bfloat16", page_size=PAGE_SIZE, layers=scale.layers, kv_heads=8, head_dim=128
    )
    num_pages = layout.pages_for(max(scale.moved))
    described, same = msgspec.json.encode(layout).decode(), True
    with tempfile.TemporaryDirectory() as home, ExitStack() as stack:
        log = Path(home) / "ucx"
        ends = [
            stack.enter_context(_child(role, described, str(num_pages), scale.device, log=log))
            for role in ("receive", "send")
        ]
        receiver, sender = ends
        sender.ask(json.dumps(receiver.read()))
        for tokens in scale.moved:
            count = layout.pages_for(tokens)
            sent = sender.ask(str(count))
            same = same and receiver.ask(str(count)) == sent["digest"]
            moved = count * layout.page_bytes
            gb_s = round(moved / sent["seconds"] / 1e9, 2)
            facts = {"tokens": tokens, "pages": count, "bytes": moved, "ms": round(sent["seconds"] * 1000, 3)}
            tell("KV from device to device", **facts, gb_s=gb_s, same=same, transport=transports(log))
            if tokens == JUDGED:
                report.reach(Target.MOVED, gb_s)
    return same


def transports(log: Path) -> list[str]:
    """The ways that UCX has chosen, by its own table; [] if this UCX writes none."""
    return sorted(set(WAYS.findall(log.read_text(errors="replace")))) if log.exists() else []


@contextmanager
def _child(role: str, *arguments: str, log: Path) -> Iterator[Child]:
    command = [sys.executable, "-m", "bench.gpu.transfer_end", role, *arguments]
    env = dict(os.environ)
    if role == "send":
        env |= {"UCX_PROTO_INFO": "y", "UCX_LOG_FILE": str(log)}
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as popen:
        try:
            yield Child(popen)
        finally:
            assert popen.stdin is not None
            popen.stdin.close()  # then it ends
            popen.wait(30)
