"""Checks constraints one at a time: `python -m components.structured.sandbox <folder> <budget_s>`.

A short grammar may need half a minute, gigabytes or the whole stack, and a thread cannot be stopped. So this is a process,
which the kernel ends at its CPU limit.
A message is a length (four bytes) and msgpack. A request is kind and text; a reply is kind and text, or the fault.
"""

import os
import resource
import signal
import sys
from pathlib import Path
from struct import Struct
from typing import BinaryIO, Final

import msgpack

from components.structured.check_constraint import Unusable, check
from components.structured.grammar import load_vocabulary
from components.wire.sampling import Constraint

LENGTH: Final = Struct("<I")
MEMORY_BYTES: Final = 2 << 30  # of address space; about 600 MB are used at the start
NICER: Final = 5  # lower priority than generation


def main(folder: Path, budget_s: float, requests: BinaryIO, replies: BinaryIO) -> None:
    """Answer requests until the pipe closes. The budget is CPU time, so a busy machine refuses no constraint."""
    os.nice(NICER)
    vocabulary = load_vocabulary(folder)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    _send(replies, ["ready"])
    while header := requests.read(LENGTH.size):
        kind, text = msgpack.unpackb(requests.read(*LENGTH.unpack(header)))
        signal.setitimer(signal.ITIMER_PROF, budget_s)
        try:
            usable = check(vocabulary, Constraint(kind=kind, text=text))
            reply = [usable.kind, usable.text]
        except Unusable as exc:
            reply = [str(exc)]
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(replies, reply)


def _send(replies: BinaryIO, reply: list[str]) -> None:
    packed = msgpack.packb(reply)
    replies.write(LENGTH.pack(len(packed)) + packed)
    replies.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), sys.stdin.buffer, sys.stdout.buffer)
