"""The limits of one API key, its usage, and OpenAI's rate-limit headers.

Limits per minute refill continuously. Tokens are charged once they are known: a prompt's when the request is accepted, an
answer's when it ends. The tokens of a prompt that is never admitted are given back. Requests in flight may put a key into
debt; its next requests are refused until the limit has refilled.
"""

import time
from collections.abc import Callable
from typing import Final

from components.api_keys import KeyLimits
from components.errors import KeyLimited

RETRY_AT_ONCE_S: Final = 1.0  # a guess: another request may end by then


class Minute:
    __slots__ = ("_at_s", "_left", "_limit")

    def __init__(self) -> None:
        self._limit = 0  # from the last call of `left`
        self._left = 0.0
        self._at_s = 0.0

    def left(self, limit: int, now_s: float) -> float:
        """Return how much is left now if `limit` is allowed per minute; negative for a key in debt."""
        if not self._limit:  # first use
            self._left = limit
        else:
            self._left = min(limit, self._left + (now_s - self._at_s) * limit / 60)
        self._limit, self._at_s = limit, now_s
        return self._left

    def take(self, amount: float) -> None:
        """Charge `amount`; call `left` first."""
        self._left -= amount

    def wait_s(self, amount: float) -> float:
        """Return the time until `amount` is left, counted from the last call of `left`."""
        return max(0.0, (amount - self._left) * 60 / self._limit)


class Account:
    """The usage of one key. Used from one event loop only."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self.tenant = name  # whose prefix cache the key uses
        self.is_operator = False  # may see requests of all tenants
        self.limits = KeyLimits()
        self._clock = clock
        self._at_once = 0
        self._requests = Minute()
        self._tokens = Minute()

    def enter(self) -> None:
        """Count a request until `leave`. Raises: KeyLimited, in which case it is not counted."""
        at_once, per_minute = self.limits.requests_at_once, self.limits.requests_per_minute
        if at_once is not None and self._at_once >= at_once:
            raise self._refusal("requests", f"{at_once} requests at once", RETRY_AT_ONCE_S)
        if per_minute is not None:
            if self._requests.left(per_minute, self._clock()) < 1:
                raise self._refusal("requests", f"{per_minute} requests a minute", self._requests.wait_s(1))
            self._requests.take(1)
        self._at_once += 1

    def leave(self) -> None:
        self._at_once -= 1

    def check_prompt(self, tokens: int) -> None:
        """Check a prompt against the tokens left. A prompt larger than the limit needs a full minute's tokens.

        Raises: KeyLimited.
        """
        limit = self.limits.tokens_per_minute
        if limit is None:
            return
        needed = min(tokens, limit)
        if self._tokens.left(limit, self._clock()) < needed:
            raise self._refusal("tokens", f"{limit} tokens a minute", self._tokens.wait_s(needed))

    def take(self, tokens: int) -> None:
        """Charge the tokens of an accepted prompt, or of an answer, however it ended. A negative number gives them back."""
        limit = self.limits.tokens_per_minute
        if limit is not None:
            self._tokens.left(limit, self._clock())
            self._tokens.take(tokens)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return OpenAI's rate-limit headers: for each limit its size, what is left, and the time until it is full again."""
        headers: list[tuple[bytes, bytes]] = []
        limits = self.limits
        for what, limit, minute in (
            (b"requests", limits.requests_per_minute, self._requests),
            (b"tokens", limits.tokens_per_minute, self._tokens),
        ):
            if limit is not None:
                left = minute.left(limit, self._clock())
                headers += [
                    (b"x-ratelimit-limit-" + what, b"%d" % limit),
                    (b"x-ratelimit-remaining-" + what, b"%d" % max(0, int(left))),
                    (b"x-ratelimit-reset-" + what, b"%.3fs" % minute.wait_s(limit)),
                ]
        return headers

    def _refusal(self, kind: str, limit: str, wait_s: float) -> KeyLimited:
        return KeyLimited(f"{self.name}: {limit}", retry_after_s=wait_s, kind=kind, limit=limit)
