"""What one API key may use: requests at once, requests and tokens a minute; and OpenAI's headers that tell of it.

What a minute allows comes back evenly. Tokens are taken when they are known: a prompt's before it goes to the mesh, an
answer's when it is over. So a key may go into debt, by what it has under way, and then waits until that is paid.
"""

import time
from collections.abc import Callable
from typing import Final

from components.api_keys import KeyLimits
from components.errors import KeyLimited

RETRY_AT_ONCE_S: Final = 1.0  # for a place of one's own: nobody knows when


class Minute:
    """What is left of so much a minute."""

    __slots__ = ("_at_s", "_left", "_limit")

    def __init__(self) -> None:
        self._limit = 0  # as of the last look
        self._left = 0.0
        self._at_s = 0.0

    def left(self, limit: int, now_s: float) -> float:
        """Now, if `limit` is what a minute allows; below 0 in debt."""
        if not self._limit:  # its first use
            self._left = limit
        else:
            self._left = min(limit, self._left + (now_s - self._at_s) * limit / 60)
        self._limit, self._at_s = limit, now_s
        return self._left

    def take(self, amount: float) -> None:
        """After a look at what is left."""
        self._left -= amount

    def wait_s(self, amount: float) -> float:
        """Until so much is left, as of the last look."""
        return max(0.0, (amount - self._left) * 60 / self._limit)


class Account:
    """What one key has used. On one event loop."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self.tenant = name  # whose prefix cache the key uses
        self.limits = KeyLimits()
        self._clock = clock
        self._at_once = 0
        self._requests = Minute()
        self._tokens = Minute()

    def enter(self) -> None:
        """A request begins; `leave` when it is over. Raises: KeyLimited, and then it has not begun."""
        at_once, per_minute = self.limits.requests_at_once, self.limits.requests_per_minute
        if at_once is not None and self._at_once >= at_once:
            raise self._refusal("requests", f"{at_once} requests at once", RETRY_AT_ONCE_S)
        if per_minute is not None:
            if self._requests.left(per_minute, self._clock()) < 1:
                raise self._refusal("requests", f"{per_minute} requests a minute", self._requests.wait_s(1))
            self._requests.take(1)
        self._at_once += 1

    def leave(self) -> None:
        """A request is over."""
        self._at_once -= 1

    def check_prompt(self, tokens: int) -> None:
        """Of a request that would go to the mesh. One with more than a minute allows goes when all of that is left.

        Raises: KeyLimited.
        """
        limit = self.limits.tokens_per_minute
        if limit is None:
            return
        needed = min(tokens, limit)
        if self._tokens.left(limit, self._clock()) < needed:
            raise self._refusal("tokens", f"{limit} tokens a minute", self._tokens.wait_s(needed))

    def take(self, tokens: int) -> None:
        """Of a prompt that goes to the mesh, or of an answer that is over, however it ended."""
        limit = self.limits.tokens_per_minute
        if limit is not None:
            self._tokens.left(limit, self._clock())
            self._tokens.take(tokens)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """OpenAI's, for each limit that there is: the limit, what is left, and when all of it will be."""
        told: list[tuple[bytes, bytes]] = []
        limits = self.limits
        for what, limit, minute in (
            (b"requests", limits.requests_per_minute, self._requests),
            (b"tokens", limits.tokens_per_minute, self._tokens),
        ):
            if limit is not None:
                left = minute.left(limit, self._clock())
                told += [
                    (b"x-ratelimit-limit-" + what, b"%d" % limit),
                    (b"x-ratelimit-remaining-" + what, b"%d" % max(0, int(left))),
                    (b"x-ratelimit-reset-" + what, b"%.3fs" % minute.wait_s(limit)),
                ]
        return told

    def _refusal(self, kind: str, limit: str, wait_s: float) -> KeyLimited:
        return KeyLimited(f"{self.name}: {limit}", retry_after_s=wait_s, kind=kind)
