"""The client's input: its request body, whose size is limited, and its disconnect."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope

from components.aio import time_limit
from components.errors import Cancelled, Stopping
from components.text.tokenizer import TextModel

DISCARD_TIMES: Final = 4  # a body of up to this many times the limit is read, so that the client reads our answer
DISCARD_S: Final = 5.0
UTF_8: Final = {"utf-8", "utf8"}
INLINE_BYTES: Final = 64 * 1024  # a larger body is parsed in a thread; parsing this much takes 10 ms at most

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Body:
    """A request body, with the text model whose threads parse a large one."""

    data: bytes
    text: TextModel

    async def made_into(self, make: Callable[[bytes], T]) -> T:
        """Return `make(data)`. Raises: what that raises; QueueFull."""
        return await self.run(partial(make, self.data))

    async def run(self, work: Callable[[], T], more: int = 0) -> T:
        """Return `work()`. It runs in a thread if the body plus `more`, the characters of stored turns, is large.

        Raises: what that raises; QueueFull.
        """
        size = len(self.data) + more
        return work() if size <= INLINE_BYTES else await self.text.run(size, work)


async def read_json_body(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    """Read the whole body.

    Raises: HTTPException, 415 unless it is plain JSON in UTF-8, 413 if it is larger than `max_bytes`;
        Cancelled, if the client disconnects before the end of the body.
    """
    headers = Headers(scope=scope)
    _check_type(headers)
    declared = headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > max_bytes:
        waits = "expect" in headers  # for 100 Continue
        raise _too_large(max_bytes, whole=not waits and await _discard(receive, max_bytes * DISCARD_TIMES))
    chunks: list[bytes] = []
    size = 0
    while True:
        chunk, more = await _read(receive)
        size += len(chunk)
        if size > max_bytes:
            raise _too_large(max_bytes, whole=not more or await _discard(receive, max_bytes * DISCARD_TIMES))
        chunks.append(chunk)
        if not more:
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _check_type(headers: Headers) -> None:
    """Raises: HTTPException."""
    media_type, *parameters = (part.strip().lower() for part in headers.get("content-type", "").split(";"))
    if media_type != "application/json":
        raise HTTPException(415)
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        charset = value.strip().strip('"')
        if name.strip() == "charset" and charset not in UTF_8:
            raise HTTPException(415, f"Send the body in UTF-8: the charset '{charset[:64]}' is not supported.")
    coding = ",".join(headers.getlist("content-encoding")).strip().lower()
    if coding not in {"", "identity"}:
        raise HTTPException(415, f"Send the body as it is: the Content-Encoding '{coding[:64]}' is not supported.")


async def _read(receive: Receive) -> tuple[bytes, bool]:
    message = await receive()
    if message["type"] == "http.disconnect":
        raise Cancelled("the client disconnected while it sent its request")
    return message.get("body", b""), message.get("more_body", False)


async def _discard(receive: Receive, max_bytes: int) -> bool:
    """Read and discard the rest. Returns whether it ended. To close while the client sends would lose our answer."""
    size, more = 0, True
    try:
        async with asyncio.timeout(DISCARD_S):
            while more and size <= max_bytes:
                chunk, more = await _read(receive)
                size += len(chunk)
    except TimeoutError:
        return False
    return not more


def _too_large(max_bytes: int, *, whole: bool) -> HTTPException:
    headers = None if whole else {"connection": "close"}  # the only way to stop a client from sending
    what = (
        f"The request body exceeds {max_bytes} bytes. Send less, or start the frontend with a larger --max-body-bytes."
    )
    return HTTPException(413, what, headers=headers)


@asynccontextmanager
async def limited_time(seconds: float) -> AsyncGenerator[None, None]:
    """Limit the `with` body to `seconds`, and to the time until the server cancels it at the end of its drain timeout.

    Raises: DeadlineExceeded; Stopping, in place of the asyncio.CancelledError.
    """
    try:
        async with time_limit(seconds, "the request took longer than"):
            yield
    except asyncio.CancelledError as exc:
        raise Stopping("the frontend's drain timeout has passed") from exc


@asynccontextmanager
async def cancelled_on_disconnect(receive: Receive, answered: Callable[[], bool]) -> AsyncGenerator[None, None]:
    """Cancel the `with` body if the client disconnects before `answered`.

    Raises: Cancelled, in place of the asyncio.CancelledError that this caused.
    """
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        if not answered():
            gone = True
            task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except (asyncio.CancelledError, Cancelled) as exc:
        if gone and task.uncancel() <= before:
            raise Cancelled("the client has gone") from exc
        raise
    finally:
        watcher.cancel()
