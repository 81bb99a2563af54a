"""Every worker says after its steps, and twice a second in any case, that it lives, what it carries and how far it has counted.

On `<subject>.heartbeat`. A lease tells of a lost process after its TTL; a heartbeat, or none, of a silent or hung one in 2 s.
"""

from components.wire.codec import Struct, message


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
