"""The engine's measurements of a step."""

from typing import Final, NamedTuple

import msgspec


class DraftCounts(NamedTuple):
    """Tokens guessed so far by speculative decoding."""

    checked: int
    accepted: int

    def plus(self, more: "DraftCounts") -> "DraftCounts":
        return DraftCounts(self.checked + more.checked, self.accepted + more.accepted)


NO_DRAFTS: Final = DraftCounts(0, 0)


class StepStats(msgspec.Struct, frozen=True):
    step: int = 0  # unchanged while work waits: the engine hangs
    num_running: int = 0
    num_waiting: int = 0
    num_reserved: int = 0  # DECODE requests without KV yet
    num_held: int = 0  # ended requests with exposed pages
    prompt_tokens: int = 0
    decode_tokens: int = 0
    free_pages: int = 0
    cached_pages: int = 0
    held_pages: int = 0
    total_pages: int = 0
    step_s: float = 0.0
    prefix_queries: int = 0  # prompt tokens looked up since start
    prefix_hits: int = 0  # of those, found
    offloaded_pages: int = 0  # evicted, and now in main memory
    restored_pages: int = 0  # from main memory, since start
    loaded_pages: int = 0  # from files, since start
    saved_pages: int = 0  # to files, since start
    unsaved_pages: int = 0  # waiting to be saved
    preemptions: int = 0  # since start
    drafted_tokens: int = 0  # since start, by speculative decoding
    accepted_tokens: int = 0  # of those, drawn
    forward: str = ""  # eager, compiled or graph

    @property
    def waits(self) -> bool:
        """Return whether work waits for something that wakes no engine: pages, or a disk."""
        return bool(self.num_waiting or self.unsaved_pages)
