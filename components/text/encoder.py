"""Tokenise text fast, and in threads if it is long."""

import asyncio
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from heapq import heappop, heappush
from itertools import count
from typing import Any, Final, TypeVar

import fastokens
from tokenizers import Tokenizer

from components.errors import QueueFull

log = logging.getLogger(__name__)

PROBES: Final = (
    "",
    " ",
    "Hello, world! I'm sure they'll say we've seen it, and he'd know.",
    "  two  spaces,\ttabs\t\tand\r\nlines\n\n\n   ends ",
    "0 12 345 6789 1,234,567.89 -1e-5 0x1F 2026-01-31T23:59:59Z",
    "def f(x: int) -> str:\n    return {'a': [x, x ** 2]}  # ok?\n\n\tpass\n",
    "\u00dcn\u00efc\u00f6d\u00e9 STRASSE stra\u00dfe \ufb01ne \u2460 \u00bd \uff41\uff42 e\u0301 \u00e9 \u1e9e \u0130i",
    "Привет мир 你好世界。日本語テキスト 한국어 \u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd नमस्ते สวัสดี",
    "🙂 \U0001f469\u200d\U0001f467 🇪🇺 \u200b\u200d\ufeff\u00a0\u2028\u0085\x00\x01\x7f",
    "aaaaaaaaaaaaaaaaaaaaaaaa ======== !!!???... ''''\"\"\"\" <|x|> </s> <s> [INST] <think>",
    "http://user@example.org:80/a_b-c.d?e=f&g=%20#h C:\\dir\\file.txt snake_case camelCase HTTPServer",
    "word " * 40 + "x" * 700,
)

LONG: Final = 100  # repetitions of the probes: 150 kB
T = TypeVar("T")

MAX_THREADS: Final = 4
S_PER_CHAR: Final = 2.5e-7  # speed of `tokenizers`
OVERTAKEN_S_PER_CHAR: Final = 20 * S_PER_CHAR  # 1 s for 200,000 characters
MAX_WAITING_CHARS: Final = 32 << 20  # about eight million tokens


class Encoder:
    """Encodes with `fastokens`, in a tenth of the time, if its ids equal those of `tokenizers`.

    Shared by all threads. Encoding releases the GIL.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """`tokenizer` must neither truncate nor pad."""
        self._tokenizer = tokenizer
        self._fast = _checked(tokenizer)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if self._fast is not None:
            try:
                return _fast_encoded(self._fast, text, add_special_tokens=add_special_tokens)
            except BaseException as exc:  # noqa: BLE001 - its regular expressions have limits, and raise no class of their own
                _check_is_its_own(exc)
                log.warning(
                    "fastokens failed on a prompt, so tokenizers encoded it, which is slower",
                    extra={"reason": str(exc), "chars": len(text)},
                )
        return _encoded(self._tokenizer, text, add_special_tokens=add_special_tokens)


def _encoded(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    # the batch call releases the GIL and skips character offsets
    ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    return ids


def _fast_encoded(tokenizer: Any, text: str, *, add_special_tokens: bool) -> list[int]:
    ids: list[int] = tokenizer.encode_batch([text], add_special_tokens)[0].ids
    return ids


def _checked(tokenizer: Tokenizer) -> Any:
    """The tokenizer of `fastokens`; None if it fails or gives other ids."""
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    together = [
        "".join(f"{content} a{content}\n" for content in added[at : at + 64]) for at in range(0, len(added), 64)
    ]
    long = "".join(PROBES) * LONG  # fastokens encodes long texts differently
    try:
        fast = fastokens.Tokenizer.from_json_str(tokenizer.to_str())
        for text in (*PROBES, *together, long):
            for special in (False, True):
                ids = _encoded(tokenizer, text, add_special_tokens=special)
                if _fast_encoded(fast, text, add_special_tokens=special) != ids:
                    log.info(
                        "encoding by tokenizers, which is slower: fastokens gives other ids", extra={"text": text[:64]}
                    )
                    return None
    except BaseException as exc:  # noqa: BLE001 - fastokens has no error class for what it lacks
        _check_is_its_own(exc)
        log.info(
            "encoding by tokenizers, which is slower: fastokens does not support this tokenizer",
            extra={"reason": str(exc)},
        )
        return None
    return fast


def _check_is_its_own(exc: BaseException) -> None:
    """Raises: `exc`, unless it is an error or a Rust panic."""
    if not isinstance(exc, Exception) and type(exc).__name__ != "PanicException":
        raise exc


class LongPrompts:
    """Renders and tokenises long prompts in threads, for the event loop.

    Shorter prompts overtake a longer one only soon after its arrival: no prompt starves.
    """

    def __init__(self, threads: int | None = None, max_waiting_chars: int = MAX_WAITING_CHARS) -> None:
        """`threads`: None means half of this process's cores, at most `MAX_THREADS`."""
        self._free = threads or max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) // 2))
        self._executor = ThreadPoolExecutor(self._free, "tokenize")
        self._threads = self._free
        self._max_chars = max_waiting_chars
        self._chars = 0
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = count()

    async def run(self, chars: int, work: Callable[[], T]) -> T:
        """Run `work` on a prompt of `chars` characters. Raises: QueueFull."""
        await self._turn(chars)
        loop = asyncio.get_running_loop()
        job = self._executor.submit(work)
        job.add_done_callback(lambda _: _call_on_loop(loop, self._pass_on))  # the thread is busy until then
        return await asyncio.wrap_future(job)

    async def _turn(self, chars: int) -> None:
        if self._free:
            self._free -= 1
            return
        if self._chars and self._chars + chars > self._max_chars:
            raise QueueFull(
                "too much waits to be tokenised",
                retry_after_s=1 + self._chars * S_PER_CHAR / self._threads,
                waiting_chars=self._chars,
            )
        turn = asyncio.get_running_loop().create_future()
        heappush(self._waiting, (time.monotonic() + chars * OVERTAKEN_S_PER_CHAR, next(self._numbers), turn))
        self._chars += chars
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # its turn had come: pass it on
                self._pass_on()
            raise
        finally:
            self._chars -= chars

    def _pass_on(self) -> None:
        while self._waiting:
            turn = heappop(self._waiting)[-1]
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1


def _call_on_loop(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(callback)
