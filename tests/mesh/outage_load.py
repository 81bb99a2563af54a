"""Clients of a mesh whose servers fail: long streams and short requests, with figures of a window of time."""

import asyncio
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count, cycle
from pathlib import Path
from typing import Final, Self

import httpx

from components.wire.sampling import SamplingParams
from tests.mesh.harness import metric
from tests.mesh.mocks import MODEL, one_engine
from tests.waiting import PATIENCE_S, wait_until

NUM_STREAMS: Final = 8
ASK_EVERY_S: Final = 0.2
SHORT_TOKENS: Final = 4
PROMPT_TOKENS: Final = 48
NUM_PROMPTS: Final = 32
CALM_S: Final = 1.0  # without an error, before a test begins
LATE_S: Final = 30.0  # for requests that began in a window; a lost one would wait for 100 s
MOVE: Final = '"event": "stream moves"'  # what a frontend logs


@dataclass(slots=True)
class Window:
    """The figures of all clients between two moments."""

    failed: list[str] = field(default_factory=list)  # causes
    wrong: list[str] = field(default_factory=list)  # texts
    answered: int = 0  # short requests that began in it
    slowest_s: float = 0.0  # of these
    longest_silence_s: float = 0.0  # of a stream, from one event to the next
    stream_events: int = 0
    moves: list[str] = field(default_factory=list)  # causes, as frontends log them
    at_prefill: int = 0  # prompt tokens computed there
    at_decode: int = 0

    def __str__(self) -> str:
        failed = f" {dict(Counter(self.failed))}" if self.failed else ""
        moves = f" {dict(Counter(self.moves))}" if self.moves else ""
        return (
            f"{self.answered} answered, slowest {self.slowest_s:.2f} s, longest silence {self.longest_silence_s:.2f} s, "
            f"{len(self.failed)} failed{failed}, {len(self.wrong)} wrong, {len(self.moves)} moves{moves}, "
            f"prompt tokens {self.at_prefill} at prefill, {self.at_decode} at decode"
        )


@dataclass(slots=True, eq=False)
class _Stream:
    event_s: float  # monotonic time of its last event, or of its request


class Load:
    """Clients in a thread of their own, which run while inside."""

    def __init__(self, home: Path, frontends: Iterator[str], logs: Iterable[Path], stream_tokens: int) -> None:
        """`frontends`: the base URL of each next request. `logs`: their log files, as JSON."""
        self.logs = list(logs)
        self.prefills: list[str] = []  # URLs of the workers' metrics
        self.decodes: list[str] = []
        self._frontends = frontends
        self._stream_tokens = stream_tokens
        self._salts = count()
        draw = random.Random(1)
        self._prompts = [[draw.randrange(ord("a"), ord("z")) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_PROMPTS)]
        sampling = SamplingParams(max_tokens=stream_tokens, temperature=0, ignore_eos=True)
        self._texts = [bytes(ids).decode() for ids in one_engine(home, self._prompts, sampling)]
        self._streams: set[_Stream] = set()
        self._asking: dict[object, float] = {}  # start of each unanswered short request
        self._answers: list[tuple[float, float]] = []  # (start, duration)
        self._silences: list[tuple[float, float]] = []  # (end, duration)
        self._failed: list[tuple[float, str]] = []
        self._wrong: list[tuple[float, str]] = []
        self._log_sizes: dict[Path, int] = {}  # in bytes, when the window began
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="load")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @contextmanager
    def window(self) -> Iterator[Window]:
        """Yield a window, filled at its end: it waits for the short requests that began inside."""
        window = Window()
        began = time.monotonic()
        self._log_sizes = {log: log.stat().st_size for log in self.logs}
        before = self._computed()
        yield window
        ended = time.monotonic()
        while time.monotonic() < ended + LATE_S and any(began <= at < ended for at in list(self._asking.values())):
            time.sleep(0.02)
        now = time.monotonic()
        unanswered = [now - at for at in list(self._asking.values()) if began <= at < ended]
        answers = [took for at, took in list(self._answers) if began <= at < ended]
        silences = [gap for at, gap in list(self._silences) if began <= at]
        going_on = [now - max(stream.event_s, began) for stream in list(self._streams)]
        after = self._computed()
        window.failed = [why for at, why in list(self._failed) if began <= at]
        window.failed += [f"no answer in {waited:.0f} s" for waited in unanswered]
        window.wrong = [what for at, what in list(self._wrong) if began <= at]
        window.answered = len(answers)
        window.slowest_s = max([*answers, *unanswered], default=0.0)
        window.stream_events = len(silences)
        window.longest_silence_s = max([*silences, *going_on], default=0.0)
        window.moves = self.moves()
        window.at_prefill, window.at_decode = (now - then for now, then in zip(after, before, strict=True))

    def moves(self) -> list[str]:
        """Return the causes of all moves since the window began."""
        return [cause for log in self.logs for cause in _moves(log, self._log_sizes.get(log, 0))]

    def until_calm(self) -> None:
        """Wait until all streams run and no request has failed for a while."""
        wait_until(self._is_calm, lambda: f"the mesh recovers: {self._failed[-5:]}, {self._answers[-20:]}")

    def _is_calm(self) -> bool:
        assert self._thread.is_alive()
        since = time.monotonic() - CALM_S
        running = [stream for stream in list(self._streams) if stream.event_s > since]
        quick = [took for at, took in list(self._answers)[-20:] if at > since and took < CALM_S]
        failed = [at for at, _ in self._failed[-1:] if at > since]
        return len(running) == NUM_STREAMS and len(quick) > CALM_S / ASK_EVERY_S / 2 and not failed

    def _computed(self) -> tuple[int, int]:
        """Return the prompt tokens computed so far at prefill and at decode."""
        at_prefill, at_decode = (sum(prompt_tokens(url) for url in urls) for urls in (self.prefills, self.decodes))
        return at_prefill, at_decode

    async def _run(self) -> None:
        async with httpx.AsyncClient(timeout=PATIENCE_S, limits=httpx.Limits(keepalive_expiry=1)) as http:
            tasks: list[asyncio.Task[object]] = [
                asyncio.create_task(self._ask_on(http)),
                *(asyncio.create_task(self._stream_on(http, i)) for i in range(NUM_STREAMS)),
            ]
            over: asyncio.Task[object] = asyncio.create_task(asyncio.to_thread(self._over.wait))
            done, _ = await asyncio.wait([over, *tasks], return_when=asyncio.FIRST_COMPLETED)
            self._over.set()
            for task in tasks:
                task.cancel()
            await asyncio.gather(over, *tasks, return_exceptions=True)
        for task in done:
            task.result()  # it has raised

    async def _stream_on(self, http: httpx.AsyncClient, number: int) -> None:
        await asyncio.sleep(number * 0.1)
        while True:
            stream = _Stream(time.monotonic())
            self._streams.add(stream)
            try:
                await self._stream(http, number, stream)
            except (httpx.HTTPError, _Refused) as exc:
                self._failed.append((time.monotonic(), f"stream: {exc!r}"))
                await asyncio.sleep(0.2)
            finally:
                self._streams.discard(stream)

    async def _stream(self, http: httpx.AsyncClient, number: int, stream: _Stream) -> None:
        expected, text = self._texts[number], ""
        body = self._body(number, self._stream_tokens) | {"stream": True}
        async with http.stream("POST", f"{next(self._frontends)}/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                raise _Refused(_code(await answer.aread()))
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                now = time.monotonic()
                self._silences.append((now, now - stream.event_s))
                stream.event_s = now
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise _Refused(event["error"]["code"])
                text += "".join(choice["text"] for choice in event["choices"])
                if not expected.startswith(text):
                    self._wrong.append((now, f"{text[-20:]!r} after {len(text)} characters"))
                    return
        if text != expected:
            raise _Refused(f"ended after {len(text)} of {len(expected)} characters")

    async def _ask_on(self, http: httpx.AsyncClient) -> None:
        """Send short requests at equal intervals, without waiting for answers."""
        async with asyncio.TaskGroup() as tasks:
            for number in cycle(range(NUM_PROMPTS)):
                tasks.create_task(self._ask(http, number))
                await asyncio.sleep(ASK_EVERY_S)

    async def _ask(self, http: httpx.AsyncClient, number: int) -> None:
        began = time.monotonic()
        self._asking[me := object()] = began
        try:
            body = self._body(number, SHORT_TOKENS)
            answer = await http.post(f"{next(self._frontends)}/v1/completions", json=body)
            if answer.status_code != 200:
                raise _Refused(_code(answer.content))
            text = answer.json()["choices"][0]["text"]
            if text != self._texts[number][:SHORT_TOKENS]:
                self._wrong.append((time.monotonic(), text))
            self._answers.append((began, time.monotonic() - began))
        except (httpx.HTTPError, _Refused) as exc:
            self._failed.append((time.monotonic(), f"request: {exc!r}"))
        finally:
            del self._asking[me]

    def _body(self, number: int, max_tokens: int) -> dict[str, object]:
        """Make a body whose salt prevents prefix hits."""
        return {
            "model": MODEL,
            "prompt": self._prompts[number],
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_salt": f"{next(self._salts)}",
        }


class _Refused(Exception):
    """An answer that is an error or incomplete."""


def _code(body: bytes) -> str:
    return str(json.loads(body)["error"]["code"])


def _moves(log: Path, start: int) -> Iterator[str]:
    """Yield the causes of the moves logged from byte `start` on. The log may end within a line."""
    whole, _, _ = log.read_bytes()[start:].decode(errors="replace").rpartition("\n")
    for line in whole.splitlines():
        if MOVE in line:
            cause = str(json.loads(line)["cause"])  # "decode <instance>: <why>", or an error of a call
            yield cause.partition(": ")[2] or cause


def prompt_tokens(url: str) -> int:
    """Return the prompt tokens that a worker has computed. `url`: of its metrics page."""
    return int(metric(url, "kvmesh_prompt_tokens_total"))
