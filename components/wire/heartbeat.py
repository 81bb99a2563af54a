"""Heartbeats: load and step counter of a worker, on `<subject>.heartbeat` or as the answer of AskHeartbeat."""

from typing import Final

from components.wire.codec import Struct, message

USUAL_NEXT_S: Final = 0.5


@message("heartbeat.v1")
class Heartbeat(Struct):
    instance_id: str
    epoch: str
    step: int  # does not change while `busy`: a hung engine
    busy: bool
    draining: bool = False
    num_running: int = 0
    num_waiting: int = 0
    num_reserved: int = 0  # requests whose KV has not arrived
    num_held: int = 0  # requests that are over, with exposed pages
    free_pages: int = 0
    cached_pages: int = 0
    held_pages: int = 0
    total_pages: int = 0
    queued_tokens: int = 0  # of prompts
    prompt_tokens_per_s: float = 0.0  # 0: unknown
    accepted: int = 0  # requests since start
    num_requests: int = 0  # branches in progress, also those that the engine does not have yet
    next_s: float = USUAL_NEXT_S  # to the next heartbeat, at most
    still_s: float = 0.0  # since the last step or idle moment
    cached: int = 0  # leading hashes of the question in its prefix cache


@message("heartbeat-ask.v1")
class AskHeartbeat(Struct):
    """To a worker on `<subject>.ask_heartbeat`, or to all of a role on `<namespace>.<role>.ask_heartbeat`."""

    hashes: bytes = b""  # of some prefixes of a prompt, ascending: 16 bytes each
