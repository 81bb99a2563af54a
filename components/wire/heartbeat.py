"""A worker's load: published on `<subject>.heartbeat`, or sent as the answer to AskHeartbeat."""

from typing import Final

from components.wire.codec import Struct, message

USUAL_NEXT_S: Final = 0.5


@message("heartbeat.v1")
class Heartbeat(Struct):
    instance_id: str
    epoch: str
    step: int  # unchanged while `busy`: the engine hangs
    busy: bool
    draining: bool = False
    num_running: int = 0
    num_waiting: int = 0
    num_reserved: int = 0  # requests whose KV has not arrived
    num_held: int = 0  # finished requests with exposed pages
    free_pages: int = 0
    cached_pages: int = 0
    held_pages: int = 0
    total_pages: int = 0
    queued_tokens: int = 0  # of prompts, still to compute
    prompt_tokens_per_s: float = 0.0  # prefill speed; 0: unknown
    accepted: int = 0  # requests since the start
    num_requests: int = 0  # branches, also those not yet in the engine
    next_s: float = USUAL_NEXT_S  # until the next heartbeat, at most
    still_s: float = 0.0  # time since the last step or idle moment
    cached: int = 0  # of the query's hashes, in the prefix cache


@message("heartbeat-ask.v1")
class AskHeartbeat(Struct):
    """Query on `<subject>.ask_heartbeat`, or on `<namespace>.<role>.ask_heartbeat` for all workers of a role."""

    hashes: bytes = b""  # 16 bytes each, of a prompt's prefixes, ascending
