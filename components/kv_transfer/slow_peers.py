"""Warn about writes between GPUs that are too slow for a direct path, because UCX does not report the path it chose."""

import logging
import time
from typing import Final

log = logging.getLogger(__name__)

SLOW_BYTES_S: Final = 3e9  # slower than any direct path between two GPUs
MIN_JUDGED_BYTES: Final = 16 << 20  # a shorter write says little about the speed


class SlowPeers:
    def __init__(self) -> None:
        self._warned: set[str] = set()

    def judge(self, agent: str, num_bytes: int, posted_s: float) -> None:
        """Warn once per peer, at the end of a write. `posted_s` is monotonic."""
        if num_bytes < MIN_JUDGED_BYTES or agent in self._warned:
            return
        bytes_s = num_bytes / max(time.monotonic() - posted_s, 1e-9)
        if bytes_s < SLOW_BYTES_S:
            self._warned.add(agent)
            log.warning(
                "KV moves slowly between GPUs: UCX may copy it through host memory. If both are on this machine, restart "
                "this worker; UCX_PROTO_INFO=y makes UCX print the paths that it uses",
                extra={"peer": agent, "gb_s": round(bytes_s / 1e9, 2)},
            )

    def forget(self, agent: str) -> None:
        self._warned.discard(agent)
