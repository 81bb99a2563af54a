"""python -m components.structured.sandbox <folder>: checks constraints, one at a time, and dies of one that costs too much.

A grammar of a few bytes may take half a minute, gigabytes or the whole stack to compile, and nothing stops a thread. So this
is a process, which the kernel ends when it has used its time, and which has no more memory than it needs.
Speaks through its pipes: a length in four bytes, then msgpack. In: kind and text; out: kind and text, or what is wrong.
"""

import os
import resource
import signal
import sys
from pathlib import Path
from struct import Struct
from typing import BinaryIO, Final

import msgpack

from components.structured.check import Unusable, check
from components.structured.grammar import load_vocabulary
from components.wire.sampling import Constraint

LENGTH: Final = Struct("<I")
MEMORY_BYTES: Final = 2 << 30  # of addresses; some 600 MB of them are taken at the start
NICER: Final = 5  # who waits for tokens comes first


def main(folder: Path, budget_s: float, requests: BinaryIO, replies: BinaryIO) -> None:
    """Answer until the other side is gone. The budget is of CPU time: a busy machine refuses nobody."""
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
