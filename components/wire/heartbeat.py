"""Heartbeats: every worker reports that it lives, its load and its step counter.

A worker publishes one on `<subject>.heartbeat` after its steps, and at least twice a second; in a large fleet less often
(`components/messaging/fan_out.py`). It answers `AskHeartbeat` with one, too: decode instances of a large fleet ask, instead
of following. A lease shows a lost process after its TTL,
missing heartbeats show a silent or hung one in 2 s.
"""

from typing import Final

from components.wire.codec import Struct, message

USUAL_NEXT_S: Final = 0.5


@message("heartbeat.v1")
class Heartbeat(Struct):
    """worker → everyone who subscribes."""

    instance_id: str
    epoch: str
    step: int  # standing still while `busy` is a hung engine
    busy: bool
    draining: bool = False
    num_running: int = 0
    num_waiting: int = 0
    num_reserved: int = 0  # requests whose KV has not arrived
    num_held: int = 0  # requests that are over, whose pages a transfer might still touch
    free_pages: int = 0
    cached_pages: int = 0
    held_pages: int = 0
    total_pages: int = 0
    queued_tokens: int = 0  # prompt tokens accepted and not computed
    prompt_tokens_per_s: float = 0.0  # computed lately; 0: none yet
    accepted: int = 0  # requests accepted since it started; the answer to each says its number
    num_requests: int = 0  # of those, not over, each of n branches for itself: the engine may not have seen the last
    next_s: float = USUAL_NEXT_S  # until its next heartbeat, at most
    still_s: float = 0.0  # since its step counter moved or it was idle; measured by the worker
    cached: int = 0  # hashes of the question up to the last one that its prefix cache has


@message("heartbeat-ask.v1")
class AskHeartbeat(Struct):
    """anyone → a worker, on `<subject>.ask_heartbeat`, or all of a role, on `<namespace>.<role>.ask_heartbeat`.

    Each answers with its Heartbeat.
    """

    hashes: bytes = b""  # of blocks of a prompt, by the pages of the worker asked, in rising depth: 16 bytes each
