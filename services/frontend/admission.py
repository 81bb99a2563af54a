"""Admission control: a request is sent to decode if there is room and the queue is empty. Else it is queued or refused.

There is room as long as

    tokens in held pages + our tokens that have not begun + others' tokens without a page  <  admit_load · capacity

Heartbeats report the first and the last term, up to half a second late. Our own tokens count from admission to the prompt's
first token. So a request with pages but no token counts twice, and memory fills only if `admit_load` is above 1. The request
that crosses the limit is admitted: otherwise a request larger than the limit would never be.

Before the first instance registers, no request is queued, because there may never be one. If all instances are lost
later, requests stay queued for `no_worker_wait_s`.
"""

import asyncio
import math
import os
from hashlib import blake2b
from typing import Final, Protocol

from components.errors import NoDecodeInstance, Overloaded, QueueFull
from components.routing.policy import REQUEST_TOKENS
from components.telemetry.figures import Batch, Queue
from services.frontend.fair_queue import AdmissionTicket, FairQueue
from services.frontend.metrics import FrontendMetrics
from services.frontend.ports import FleetRoom, Mesh

CHECK_INTERVAL_S: Final = 0.05  # between checks of decode's load and of how long requests have waited
RATE_WINDOW_S: Final = 10.0
REFUSALS: Final = {  # by their reason in the metric
    "full": "the admission queue is full",
    "shed": "the admission queue was full, and another request replaced this one",
    "age": "this request waited too long in the admission queue",
}
RETRY_S: Final = (1.0, 60.0)  # bounds of Retry-After; OpenAI's clients ignore values that are much longer
ANSWER_WEIGHT: Final = 2  # cost of an answer token in prompt tokens, as in arXiv:2401.00588
ANONYMOUS: Final = b""
_PEPPER: Final = os.urandom(16)


class Limits(Protocol):
    @property
    def queue_tokens(self) -> int:
        pass

    @property
    def queue_timeout_s(self) -> float:
        pass

    @property
    def admit_load(self) -> float:
        """Share of decode's capacity; above 1."""

    @property
    def max_inflight(self) -> int | None:
        """Maximum number of admitted requests; None: no limit."""


def queue_key(api_key: bytes) -> bytes:
    """Return the fair queue's key for clients that send `api_key`; it does not reveal the API key."""
    return blake2b(api_key, digest_size=16, key=_PEPPER).digest() if api_key else ANONYMOUS


class AdmittedRate:
    def __init__(self, now_s: float) -> None:
        self._since_s = self._at_s = now_s
        self._sum = 0.0  # tokens, decayed by e^(-t / RATE_WINDOW_S)

    def add(self, tokens: int, now_s: float) -> None:
        self._sum = self._decayed(now_s) + tokens
        self._at_s = now_s

    def per_s(self, now_s: float) -> float:
        seen_s = RATE_WINDOW_S * -math.expm1(-max(now_s - self._since_s, 1.0) / RATE_WINDOW_S)
        return self._decayed(now_s) / seen_s

    def _decayed(self, now_s: float) -> float:
        return self._sum * math.exp((self._at_s - now_s) / RATE_WINDOW_S)


class Admission:
    def __init__(self, mesh: Mesh, limits: Limits, metrics: FrontendMetrics) -> None:
        self._mesh = mesh
        self._limits = limits
        self._max_inflight = limits.max_inflight or math.inf
        self._queue = FairQueue(limits.queue_tokens)
        self._inflight = 0
        self._choices_not_started = 0  # our choices without a token yet
        self._tokens_not_started = 0
        self._usual_tokens = 0.0  # tokens of a choice; moving average
        self._room: FleetRoom | None = None
        self._known_tokens = 0.0  # load of decode without our own requests
        self._limit_tokens = math.inf
        self._next_check_s = -math.inf
        self._rate: AdmittedRate | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._metrics = metrics
        metrics.show_queue(lambda: len(self._queue), lambda: self._queue.tokens)

    def queue(self) -> Queue:
        since_s = self._queue.oldest_since_s
        return Queue() if since_s is None else Queue(len(self._queue), asyncio.get_running_loop().time() - since_s)

    def batch(self) -> Batch:
        return Batch(self._inflight, len(self._queue))

    def enter(self, key: bytes, priority: int, prompt_tokens: int, choices: int = 1) -> AdmissionTicket:
        """Admit or queue a request. If the ticket has an `admission_result`, await `admitted`. Always call `leave` at the end.

        Raises: QueueFull, if the request cannot be queued either.
        """
        now_s = asyncio.get_running_loop().time()
        ticket = AdmissionTicket(key, priority, prompt_tokens + REQUEST_TOKENS * choices, now_s, choices)
        if not self._queue and self._has_room(now_s):
            self._admit(ticket, now_s)
        else:
            self._wait(ticket, now_s)
        return ticket

    def began(self, ticket: AdmissionTicket, prompt_tokens: int) -> None:
        """Record the first token of a choice. `prompt_tokens`: length of the prompt for its first choice; 0 for the others."""
        if ticket.is_admitted:
            self._count_begun(ticket, 1, prompt_tokens + REQUEST_TOKENS)
            self._pump()

    def leave(self, ticket: AdmissionTicket, answer_tokens: int = 0) -> None:
        if ticket in self._queue:
            self._queue.remove(ticket)
        if ticket.is_admitted:
            ticket.is_admitted = False
            self._inflight -= 1
            self._count_begun(ticket, ticket.choices_not_started, ticket.tokens_not_started)
            self._queue.charge(ticket.key, ticket.priority, ANSWER_WEIGHT * answer_tokens)
            self._pump()

    def _has_room(self, now_s: float) -> bool:
        if now_s >= self._next_check_s:
            self._update_room(now_s)
        return (
            self._known_tokens + self._tokens_not_started < self._limit_tokens and self._inflight < self._max_inflight
        )

    def _update_room(self, now_s: float) -> None:
        self._next_check_s = now_s + CHECK_INTERVAL_S
        room = self._mesh.room()
        if room == self._room:
            return  # no new heartbeat: our requests that have begun since would count as other frontends'
        self._room = room
        others = max(0, room.num_waiting - self._choices_not_started)
        self._known_tokens = room.held_tokens + others * self._usual_tokens
        if room.capacity_tokens is not None:
            self._limit_tokens = self._limits.admit_load * room.capacity_tokens
        elif self._limit_tokens < math.inf:  # all are lost: the first to return must not get the whole queue
            self._known_tokens = self._limit_tokens

    def _admit(self, ticket: AdmissionTicket, now_s: float) -> None:
        ticket.is_admitted = True
        self._inflight += 1
        self._choices_not_started += ticket.choices_not_started
        self._tokens_not_started += ticket.tokens
        self._usual_tokens += (ticket.tokens / ticket.choices_not_started - self._usual_tokens) / 16
        if self._rate is None:
            self._rate = AdmittedRate(now_s)
        self._rate.add(ticket.tokens, now_s)
        self._metrics.queue_time.observe(now_s - ticket.since_s)

    def _wait(self, ticket: AdmissionTicket, now_s: float) -> None:
        for dropped in self._queue.put(ticket):
            if dropped is ticket:
                raise self._refusal("full", now_s)
            _end_wait(dropped, self._refusal("shed", now_s))
        ticket.admission_result = asyncio.get_running_loop().create_future()
        self._check_later()

    def _refusal(self, why: str, now_s: float) -> QueueFull:
        self._metrics.refused.labels(why).inc()
        rate = 0.0 if self._rate is None else self._rate.per_s(now_s)
        least, most = RETRY_S
        retry_after_s = min(max(self._queue.tokens / rate, least), most) if rate > 0 else most
        return QueueFull(
            REFUSALS[why],
            retry_after_s=retry_after_s,
            waiting=len(self._queue),
            waiting_tokens=self._queue.tokens,
        )

    def _pump(self) -> None:
        if not self._queue:
            return
        now_s = asyncio.get_running_loop().time()
        while self._queue and self._has_room(now_s):
            ticket = self._queue.take()
            self._admit(ticket, now_s)
            _end_wait(ticket, None)

    def _check_later(self) -> None:
        if self._timer is None and self._queue:
            self._timer = asyncio.get_running_loop().call_later(CHECK_INTERVAL_S, self._tick)

    def _tick(self) -> None:
        self._timer = None
        now_s = asyncio.get_running_loop().time()
        for ticket in self._queue.waiting_since(now_s - self._limits.queue_timeout_s):
            self._queue.remove(ticket)
            _end_wait(ticket, self._refusal("age", now_s))
        if self._room is not None and self._room.capacity_tokens is None and not self._mesh.models():
            for ticket in self._queue.waiting_since(now_s):
                self._queue.remove(ticket)
                _end_wait(ticket, NoDecodeInstance("no decode instance has come back", retry_after_s=2.0))
        self._pump()
        self._check_later()

    def _count_begun(self, ticket: AdmissionTicket, choices: int, tokens: int) -> None:
        ticket.choices_not_started -= choices
        ticket.tokens_not_started -= tokens
        self._choices_not_started -= choices
        self._tokens_not_started -= tokens


def _end_wait(ticket: AdmissionTicket, refusal: Overloaded | None) -> None:
    """Admit (None) or refuse a queued request. A request that was just cancelled is ignored, because it calls `leave`."""
    if ticket.admission_result is not None and not ticket.admission_result.done():
        ticket.admission_result.set_result(refusal)
