"""Find the micro services of a mesh by their answers on `$SRV`."""

from collections.abc import Collection
from typing import Final

import msgspec

from components.messaging.bus import Bus
from components.messaging.scatter_gather import ask_all
from components.wire.codec import MALFORMED

REGISTERED_TIMEOUT_S: Final = 3.0  # registered instances may be busy
OTHERS_TIMEOUT_S: Final = 0.5


class Metadata(msgspec.Struct, frozen=True):
    subject: str = ""  # of its calls, without the verb
    instance_id: str = ""


class CallStats(msgspec.Struct, frozen=True):
    errors: int = 0


class EndpointStats(msgspec.Struct, frozen=True):
    name: str
    num_requests: int = 0
    data: CallStats | None = None


class MicroService(msgspec.Struct, frozen=True):
    """An answer to PING, INFO or STATS."""

    name: str = ""
    metadata: Metadata = Metadata()
    endpoints: tuple[EndpointStats, ...] = ()  # empty after PING

    @property
    def num_errors(self) -> int:
        return sum(one.data.errors for one in self.endpoints if one.data is not None)


_decoder: Final = msgspec.json.Decoder(MicroService)


async def find_services(
    bus: Bus, subject: str, namespace: str, expected: Collection[str] = (), wait_s: float = OTHERS_TIMEOUT_S
) -> list[MicroService]:
    """Return the micro services of a mesh that answer on `subject`, such as `$SRV.PING.kvmesh-planner`.

    Args:
        expected: subjects of registered instances, which get REGISTERED_TIMEOUT_S to answer.
        wait_s: timeout for all others.
    Raises: MeshError.
    """
    found = []
    missing = set(expected)

    def receive(data: bytes) -> bool:
        try:
            service = _decoder.decode(data)
        except MALFORMED:  # an answer of another program, which may have any metadata
            return False
        if service.metadata.subject.startswith(f"{namespace}."):
            found.append(service)
            missing.discard(service.metadata.subject)
        return not missing

    await ask_all(bus, subject, b"", receive, wait_s=REGISTERED_TIMEOUT_S if missing else wait_s, least_s=wait_s)
    return found
