"""A follower of the mock engine. It maps a rank's pages for its transfer end; the leader writes the marks."""

import ctypes
import mmap
import os
import threading
from collections.abc import Callable

from engine.parallel.orders import Report, Start


def follow(start: Start, report: Callable[[Report], None]) -> None:
    """Map this rank's pages, then wait until the leader ends."""
    num_bytes = os.fstat(start.memory).st_size // start.config.tensor_parallel
    pages = mmap.mmap(start.memory, num_bytes, offset=start.rank * num_bytes)
    report(Report(os.getpid(), "cpu", address=ctypes.addressof(ctypes.c_char.from_buffer(pages))))
    threading.Event().wait()
