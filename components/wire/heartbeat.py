"""A worker's load, on `<subject>.heartbeat` or as the answer to AskHeartbeat."""

from typing import Final

from components.wire.codec import Struct, message

USUAL_NEXT_S: Final = 0.5


@message("heartbeat.v1")
class Heartbeat(Struct):
    instance_id: str
    epoch: str
    step: int  # constant while `busy`: the engine hangs
    busy: bool
    draining: bool = False
    num_running: int = 0
    num_waiting: int = 0
    num_reserved: int = 0  # their KV has not arrived
    num_held: int = 0  # finished, with exposed pages
    free_pages: int = 0
    cached_pages: int = 0
    held_pages: int = 0
    total_pages: int = 0
    queued_tokens: int = 0  # of prompts
    prompt_tokens_per_s: float = 0.0  # 0: unknown
    accepted: int = 0  # requests since start
    num_requests: int = 0  # branches, also those not yet in the engine
    next_s: float = USUAL_NEXT_S  # at most, until the next heartbeat
    still_s: float = 0.0  # since the last step or idle moment
    cached: int = 0  # asked hashes in its prefix cache


@message("heartbeat-ask.v1")
class AskHeartbeat(Struct):
    """On `<subject>.ask_heartbeat`, or `<namespace>.<role>.ask_heartbeat` for all."""

    hashes: bytes = b""  # 16 bytes each, of a prompt's prefixes, ascending
