"""Warns of writes between GPUs that are too slow for a direct path: UCX does not report which path it chose."""

import logging
import time
from typing import Final

log = logging.getLogger(__name__)

SLOW_BYTES_S: Final = 3e9  # less than any direct way between two GPUs moves
JUDGED_BYTES: Final = 16 << 20  # a shorter write tells little about the speed


class SlowPeers:
    def __init__(self) -> None:
        self._warned: set[str] = set()

    def judge(self, agent: str, num_bytes: int, posted_s: float) -> None:
        """Warn once per peer, when a write that was posted at `posted_s`, monotonic, has ended."""
        if num_bytes < JUDGED_BYTES or agent in self._warned:
            return
        bytes_s = num_bytes / max(time.monotonic() - posted_s, 1e-9)
        if bytes_s < SLOW_BYTES_S:
            self._warned.add(agent)
            log.warning(
                "KV moves slowly between GPUs: UCX may copy it through host memory. If both are on this machine, restart "
                "this worker; UCX_PROTO_INFO=y lets UCX print the ways that it takes",
                extra={"peer": agent, "gb_s": round(bytes_s / 1e9, 2)},
            )

    def forget(self, agent: str) -> None:
        self._warned.discard(agent)
