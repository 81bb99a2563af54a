"""Heartbeats: load, step counter and sign of life of a worker.

A worker publishes one on `<subject>.heartbeat` after its steps, at least twice a second; less often in a large
fleet (`components/messaging/fan_out.py`), where it also answers `AskHeartbeat` with one. A lease reveals a dead
process after its TTL, missing heartbeats a silent or hung one in 2 s.
"""

from typing import Final

from components.wire.codec import Struct, message

USUAL_NEXT_S: Final = 0.5


@message("heartbeat.v1")
class Heartbeat(Struct):
    instance_id: str
    epoch: str
    step: int  # constant while `busy`: a hung engine
    busy: bool
    draining: bool = False
    num_running: int = 0
    num_waiting: int = 0
    num_reserved: int = 0  # requests whose KV has not arrived
    num_held: int = 0  # requests that are over, whose pages a transfer may still touch
    free_pages: int = 0
    cached_pages: int = 0
    held_pages: int = 0
    total_pages: int = 0
    queued_tokens: int = 0  # prompt tokens accepted and not computed
    prompt_tokens_per_s: float = 0.0  # recent; 0: unknown
    accepted: int = 0  # requests since start; the answer to each has its number
    num_requests: int = 0  # of those, not over, each branch counted: the engine may not have seen the last
    next_s: float = USUAL_NEXT_S  # until the next heartbeat, at most
    still_s: float = 0.0  # since its step counter moved or it was idle; measured by the worker
    cached: int = 0  # leading hashes of the question that its prefix cache has


@message("heartbeat-ask.v1")
class AskHeartbeat(Struct):
    """anyone → a worker, on `<subject>.ask_heartbeat`, or all of a role, on `<namespace>.<role>.ask_heartbeat`.

    Each answers with its Heartbeat.
    """

    hashes: bytes = b""  # of a prompt's blocks in the worker's page size, in rising depth: 16 bytes each
