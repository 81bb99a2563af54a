"""What happens to a stream, in every order and a few turns of the event loop apart: no token is lost or shown twice."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from itertools import permutations, product
from random import Random
from typing import Any, Final

import pytest

from components.discovery.book import InstanceBook
from components.errors import (
    Cancelled,
    DeadlineExceeded,
    DecodeLost,
    MeshError,
    NobodyListens,
    Overloaded,
    PromptTooLong,
)
from components.messaging import fleet, liveness
from components.messaging.call_server import Endpoint
from components.messaging.clocks import now_ms
from components.messaging.inbox import StreamInbox
from components.messaging.liveness import Loss
from components.messaging.outbox import OutStream
from components.wire.codec import Struct
from components.wire.generate import (
    CancelStreams,
    FramesResent,
    GenerateAccepted,
    GenerateRequest,
    StreamItem,
    StreamsCancelled,
)
from components.wire.sampling import SamplingParams, branch_seed
from components.wire.tokens import unpack_tokens
from services.frontend.mesh_client import Branch, MeshClient
from services.frontend.ports import Prompt
from tests.components.discovery.records import record
from tests.components.messaging.fake_bus import FakeBus
from tests.components.messaging.frames import Message
from tests.components.wire.frames import frame_of
from tests.faults.virtual_loop import run_virtually
from tests.waiting import turns

PROMPT: Final = [1, 2, 3]
MOST_TOKENS: Final = 6
SEED: Final = 11
OVER_S: Final = 20.0  # in which a request must end
LIFE_S: Final = 60
SEEDS: Final = {branch_seed(SEED, branch): branch for branch in range(2)}


def whole(branch: int) -> list[int]:
    """The answer. Each token follows from the branch's seed and its position."""
    return [_token(branch, len(PROMPT) + number) for number in range(MOST_TOKENS)]


def _token(branch: int, position: int) -> int:
    return 1000 * (branch + 1) + position


@dataclass
class Served:
    """A stream as the process that sends it sees it."""

    out: OutStream
    branch: int
    position: int
    left: int
    is_over: bool = False
    cancels: int = 0


@dataclass
class Worker:
    """A decode process."""

    mesh: "Mesh"
    name: str
    epoch: str
    eager: int = 0  # tokens that it sends at once
    lives: bool = True
    refusal: MeshError | None = None
    streams: dict[int, Served] = field(default_factory=dict)
    frames: list[bytes] = field(default_factory=list)
    oldest: int = 0  # frame that it still has

    async def generate(self, request: GenerateRequest) -> GenerateAccepted:
        if self.refusal is not None:
            raise self.refusal
        tokens = list(unpack_tokens(request.token_ids))
        assert tokens[: len(PROMPT)] == PROMPT
        assert request.num_generated == len(tokens) - len(PROMPT)
        assert request.epoch == self.epoch
        if request.stream_id in self.streams:  # sent again, as its answer was lost
            return GenerateAccepted(request_id=request.request_id, number=1)
        for number in range(request.sampling.n):
            branch = number if request.sampling.n > 1 else SEEDS[request.sampling.seed]
            assert tokens[len(PROMPT) :] == whole(branch)[: request.num_generated], "it moves with what was shown"
            assert request.sampling.max_tokens == MOST_TOKENS - request.num_generated
            out = OutStream(request.reply_to, request.stream_id + number)
            self.streams[out.stream_id] = Served(out, branch, len(tokens), request.sampling.max_tokens)
        for _ in range(self.eager):
            asyncio.get_running_loop().call_soon(self._token_soon)
        return GenerateAccepted(request_id=request.request_id, number=1)

    def _token_soon(self) -> None:
        self.mesh.tasks.append(asyncio.ensure_future(self.token()))

    async def cancel(self, request: CancelStreams) -> StreamsCancelled:
        assert request.reply_to == self.mesh.inbox.subject
        for stream_id in request.stream_ids:
            if (served := self.streams.get(stream_id)) is not None:  # else sent to the process before
                served.cancels += 1
        return StreamsCancelled(count=0)

    def running(self) -> list[Served]:
        return [s for s in self.streams.values() if not s.is_over and not s.cancels]

    async def send(self, *items: StreamItem, lost: bool = False) -> None:
        if not self.lives or not items:
            return
        data = frame_of(self.name, self.epoch, 1, items, len(self.frames)).pack()
        self.frames.append(data)
        if not lost:
            await self.mesh.inbox.receive(Message(data))

    def next_item(self, served: Served) -> StreamItem:
        served.left -= 1
        served.position += 1
        served.is_over = not served.left
        return served.out.tokens([_token(served.branch, served.position - 1)], "length" if served.is_over else None)

    async def token(self, *, lost: bool = False) -> None:
        await self.send(*map(self.next_item, self.running()), lost=lost)

    async def end(self, *, only_first: bool = False) -> None:
        for served in self.running()[: 1 if only_first else None]:
            while not served.is_over:
                await self.send(self.next_item(served))

    async def fail(self, error: MeshError) -> None:
        running = self.running()
        for served in running:
            served.is_over = True
        await self.send(*(served.out.error(error) for served in running))


class Bus(FakeBus):
    def __init__(self) -> None:
        super().__init__()
        self.lost_answers = 0  # to the next calls: the process that took them has not reconnected yet
        self.reconnected_s = -math.inf

    async def call(self, subject: str, request: Struct, *_: Any, timeout_s: float) -> Any:
        """Answers in time. As the real bus, it does not swallow a cancellation: `asyncio.wait_for` may, in Python 3.11."""
        handler = self._send(subject, request)
        await asyncio.sleep(0)
        if handler is None:
            raise NobodyListens(f"no process listens on {subject}")
        answer = await handler(request)
        await asyncio.sleep(0)
        if self.lost_answers:
            self.lost_answers -= 1
            raise NobodyListens(f"no process listens on {subject}")
        return answer

    def since_reconnect_s(self) -> float:
        return asyncio.get_running_loop().time() - self.reconnected_s


class Mesh:
    """A frontend, and decode processes that the test plays."""

    def __init__(self) -> None:
        self.bus, self.book = Bus(), InstanceBook()
        self.inbox = StreamInbox("ns.frontend.f.tokens", self.resend)
        self.decodes = liveness.Liveness(self.book, "decode")
        self.fleet = fleet.Fleet(self.book, self.decodes, "decode", "round_robin", Random(0))
        self.client = MeshClient(self.bus, self.inbox, self.fleet, "m")
        self.tasks: list[asyncio.Future[None]] = []
        self.workers: list[Worker] = []
        self.serving: dict[str, Worker] = {}

    def start(self, name: str, epoch: str = "1", eager: int = 0) -> Worker:
        worker = self.serving[name] = Worker(self, name, epoch, eager)
        self.workers.append(worker)
        endpoints = [
            Endpoint("generate", GenerateRequest, worker.generate),
            Endpoint("cancel", CancelStreams, worker.cancel),
        ]
        self.bus.serve(f"ns.decode.{name}", endpoints)
        self.book.put(name, record(name, epoch, model="m", max_context=100))
        return worker

    def stop(self, name: str) -> None:
        self.serving.pop(name).lives = False
        for endpoint in ("generate", "cancel"):
            del self.bus.handlers[f"ns.decode.{name}.{endpoint}"]

    async def resend(self, instance_id: str, first: int) -> FramesResent:
        await asyncio.sleep(0.001)
        worker = self.serving.get(instance_id)
        if worker is None:
            raise NobodyListens("gone")
        made = len(worker.frames)
        for data in worker.frames[max(first, worker.oldest) :]:
            await self.inbox.receive(Message(data))
        return FramesResent(oldest=worker.oldest, next=max(first, made), made=made)


class Client:
    """A `services.frontend.ports.Sink`, and the request's task."""

    def __init__(self, mesh: Mesh, num_branches: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(num_branches)]
        self.ends: list[str | None] = [None] * num_branches
        self.error: Exception | None = None
        self.left = False
        self.wrong: list[str] = []  # an error here would be one of the sink: the product survives it
        self.over = asyncio.Event()
        self._branches: list[Branch] = []
        self.task = asyncio.ensure_future(self._ask(mesh.client, num_branches))

    async def _ask(self, client: MeshClient, num_branches: int) -> None:
        sampling = SamplingParams(max_tokens=MOST_TOKENS, seed=SEED, n=num_branches)
        prompt = Prompt("r", "m", PROMPT, sampling, "", now_ms() + LIFE_S * 1000)
        try:
            self._branches = await client.generate(prompt, self)
        except MeshError as exc:
            self.fail(exc)
        if self.over.is_set():
            self.close()

    @property
    def _is_starting_after_error(self) -> bool:
        """The first branch has failed before the others began: as `Generation`, this cannot close them yet."""
        return self.error is not None and not self._branches

    def add_tokens(self, branch: int, item: StreamItem) -> bool:
        if self._is_starting_after_error:
            return False
        if self.left or self.error is not None or self.ends[branch] is not None:
            self.wrong.append(f"branch {branch} goes on after its end with {item}")
        self.tokens[branch] += item.token_ids
        self.ends[branch] = item.finish
        if all(self.ends):
            self.over.set()
        return True

    def fail(self, error: Exception) -> None:
        if self._is_starting_after_error:
            return
        if self.left or self.error is not None or all(self.ends):
            self.wrong.append(f"a request that is over fails with {error!r}")
        self.error = error
        self.over.set()
        self.close()

    def leave(self) -> None:
        if not self.over.is_set():
            self.left = True
            self.over.set()
        self.task.cancel()
        self.close()

    def close(self) -> None:
        for branch in self._branches:
            branch.close()


Event = Callable[[Mesh, Client], Awaitable[None]]


def on_first(act: Callable[[Worker], Awaitable[None]]) -> Event:
    """By the process that was asked first, whether it serves the stream or not."""

    async def event(mesh: Mesh, _: Client) -> None:
        await act(mesh.workers[0])

    return event


async def _again(worker: Worker) -> None:
    for data in worker.frames[-2:]:
        await worker.mesh.inbox.receive(Message(data))


async def _forgotten(worker: Worker) -> None:
    worker.oldest = len(worker.frames)


async def _expires(mesh: Mesh, _: Client) -> None:
    loop: Any = asyncio.get_running_loop()
    loop._leaping.now_s += LIFE_S + 1
    await mesh.workers[0].fail(DeadlineExceeded("the request's deadline passed"))


async def _reconnects(mesh: Mesh, _: Client) -> None:
    mesh.bus.lost_answers, mesh.bus.reconnected_s = 2, asyncio.get_running_loop().time()


async def _silent(mesh: Mesh, _: Client) -> None:
    if (health := mesh.decodes._health.get("a")) is not None:
        mesh.decodes._lose(health, Loss.SILENT, "silent")


async def _ended(mesh: Mesh, _: Client) -> None:
    if "a" in mesh.serving:
        mesh.stop("a")
        mesh.book.remove("a")


async def _anew(mesh: Mesh, _: Client) -> None:
    if "a" in mesh.serving:
        mesh.stop("a")
    mesh.start("a", "2")


async def _left(_: Mesh, client: Client) -> None:
    client.leave()


EVENTS: Final[dict[str, Event]] = {
    "token": on_first(Worker.token),
    "lost": on_first(lambda worker: worker.token(lost=True)),
    "again": on_first(_again),
    "forgotten": on_first(_forgotten),
    "end": on_first(lambda worker: worker.end(only_first=True)),
    "drains": on_first(lambda worker: worker.fail(Overloaded("this instance is draining"))),
    "breaks": on_first(lambda worker: worker.fail(DecodeLost("stopped"))),
    "gives up": on_first(lambda worker: worker.fail(Cancelled("the frontend has gone"))),
    "refuses": on_first(lambda worker: worker.fail(PromptTooLong("too long"))),
    "expires": _expires,
    "reconnects": _reconnects,
    "silent": _silent,
    "ended": _ended,
    "anew": _anew,
    "left": _left,
}
ERRORS: Final[dict[type[Exception], str]] = {PromptTooLong: "refuses", DeadlineExceeded: "expires"}  # with their cause


async def _run(order: tuple[str, ...], num_branches: int, begun: int, pause: int) -> None:
    mesh = Mesh()
    mesh.start("a")
    mesh.start("b", eager=1)
    looking = asyncio.ensure_future(mesh.inbox.query_quiet_sources())
    client = Client(mesh, num_branches)
    await turns(begun)
    for name in order:
        await EVENTS[name](mesh, client)
        await turns(pause)
        _assert_load_is_counted(mesh)
    await _end(mesh, client)
    if client.left:
        assert "left" in order
    elif client.error is not None:
        assert ERRORS.get(type(client.error)) in order, client.error
    else:
        assert all(client.ends)
    _assert_nothing_is_kept(mesh)
    await _ask_later(mesh, is_calm={"forgotten", "expires"}.isdisjoint(order))
    looking.cancel()
    await asyncio.gather(looking, *mesh.tasks, return_exceptions=True)
    mesh.inbox.stop()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def _ask_later(mesh: Mesh, *, is_calm: bool) -> None:
    """Each instance that is there serves later requests, whatever arrives late of a process that has ended.

    `is_calm`: no frame is lost for good, and a reconnect is not long ago. So no request moves.
    """
    moves, cancels = mesh.client.moves, len(mesh.bus.of(CancelStreams))
    before = moves._streams.copy(), moves._requests.copy()
    for _ in range(2):  # one at each instance
        client = Client(mesh, 1)
        await turns(20)
        if not mesh.workers[0].lives:
            await _again(mesh.workers[0])
        await _end(mesh, client)
        assert all(client.ends)
    if is_calm:
        assert (moves._streams, moves._requests) == before
        assert len(mesh.bus.of(CancelStreams)) == cancels


async def _end(mesh: Mesh, client: Client) -> None:
    async with asyncio.timeout(OVER_S):
        while not client.over.is_set():
            for worker in list(mesh.serving.values()):
                await worker.end()
            await asyncio.sleep(0.01)
    client.close()
    await asyncio.wait((client.task,))
    await turns(5)
    assert client.wrong == []
    for branch, (tokens, end) in enumerate(zip(client.tokens, client.ends, strict=True)):
        assert tokens == whole(branch)[: len(tokens)]
        assert (end == "length") == (len(tokens) == MOST_TOKENS)


def _assert_load_is_counted(mesh: Mesh) -> None:
    """A request counts as a whole until its last branch is over."""
    for member in mesh.fleet.router.book.members:
        source = mesh.inbox._sources.get(member.instance_id)
        assert min(member.running, member.queued_tokens, member.used_pages) >= 0
        assert member.running >= (0 if source is None else len(source.streams))


def _assert_nothing_is_kept(mesh: Mesh) -> None:
    for worker in mesh.workers:
        for served in worker.streams.values():
            if served.is_over or not worker.lives:  # it knows by itself
                assert served.cancels <= 1
            else:
                assert served.cancels == 1, "a process that no longer serves is told so, once"
    assert not len(mesh.inbox)
    assert mesh.inbox._sources.keys() <= mesh.serving.keys()
    assert not mesh.client._sending
    book = mesh.fleet.router.book
    assert not book._own_requests
    assert not book._unreported
    for member in book.members:
        assert (member.running, member.queued_tokens, member.used_pages) == (0, 0, 0)


# branches, and turns of the event loop after the request and between two events: one turn after it, the call is under way
TIMES: Final = [*product((1, 2), (1, 20), range(3))]


def _orders(first: str) -> Iterator[tuple[tuple[str, ...], int, int, int]]:
    """Each order of three events at one of the times, in turn."""
    others = [name for name in EVENTS if name != first]
    for number, following in enumerate(permutations(others, 2)):
        num_branches, begun, pause = TIMES[(number + number // (len(others) - 1)) % len(TIMES)]
        yield (first, *following), num_branches, begun, pause


@pytest.mark.parametrize("first", EVENTS)
def test_each_token_is_shown_once_and_nothing_is_kept(first: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)  # thousands of moves

    async def all_orders() -> None:
        for order, num_branches, begun, pause in _orders(first):
            try:
                await _run(order, num_branches, begun, pause)
            except BaseException as exc:
                exc.add_note(f"{num_branches} branches: {order}, {begun} turns later, {pause} turns apart")
                raise

    run_virtually(all_orders)
