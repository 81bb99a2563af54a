"""Kills a worker on this machine from `/ui`, for a mesh that `services.local` runs.

Only a browser on this machine may do so. Its address must be loopback, no proxy may have forwarded the request, the page must
be this server's, and the request must have a header that a plain form cannot send.
"""

from typing import Final
from urllib.parse import urlsplit

from starlette.requests import Request

from components.errors import Rejected
from components.messaging.bus import Bus
from components.urls import is_loopback
from components.wire.plans import KillWorker, WorkerKilled

OWN_HEADER: Final = "x-kvmesh-ui"
FORWARDED: Final = ("forwarded", "x-forwarded-for", "x-real-ip", "via")
ANSWER_S: Final = 5.0


class LocalControl:
    def __init__(self, bus: Bus, subject: str) -> None:
        """`subject`: subject of the `services.local` that runs this process."""
        self._bus = bus
        self._subject = subject

    async def kill(self, instance_id: str) -> str:
        """Return the killed worker's name, such as decode-0. Raises: MeshError."""
        order = KillWorker(instance_id=instance_id)
        return (await self._bus.call(f"{self._subject}.kill", order, WorkerKilled, timeout_s=ANSWER_S)).name


def is_from_this_machine(request: Request) -> bool:
    if request.client is None or any(name in request.headers for name in FORWARDED):
        return False
    return is_loopback(request.client.host)


def check_origin(request: Request) -> None:
    """Check that neither another machine nor another site's page can have sent `request`. Raises: Rejected."""
    if not is_from_this_machine(request):
        raise Rejected("workers can only be killed from a browser on the mesh's own machine", code="not_local")
    origin = request.headers.get("origin")
    is_own = origin is None or urlsplit(origin).netloc == request.headers.get("host")
    if not is_own or OWN_HEADER not in request.headers:  # also of origins that --cors-origins allows elsewhere
        raise Rejected("workers can only be killed from the page at /ui", code="not_local")
