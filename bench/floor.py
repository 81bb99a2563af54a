"""The cost of a request's hops in Python alone, beside `bench.mesh`, by turns.

    python -m bench.floor                   # zero-cost, c = 1, 16, 64
    python -m bench.floor --step-ms 1       # a step of a millisecond: about as many events as the mesh's

A frontend that tokenises and streams, decode, prefill, bootstrap, and NATS between them. No validation, spans,
metrics, routing, failures, pages or engine.
"""

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import msgpack
import nats
import typer
import uvicorn
import uvloop
from nats.aio.client import Client
from nats.aio.msg import Msg

from bench.closed_loop import Prompts, figures, measure
from bench.mesh import mock_env
from bench.peers.arguments import model_directory
from bench.processes import free_port, mesh, model_name
from bench.turns import Concurrency, OutputLen, Rounds, compare
from components.process import run, settle
from components.text.tokenizer import TextModel
from services.local.servers import NATS, running

KVMESH, FLOOR = "kvmesh", "floor"
COMPARED: Final = ("req_s", "ttft_ms_p50", "servers_cpu_ms_per_request")
FRAMES: Final = "frames"  # the frontend's subject
FRAME_INTERVAL_S: Final = 0.003  # as in the mesh
PROMPT_PAGES: Final = list(range(15))
ANSWER_S: Final = 10.0
WARM_UP_S: Final = 2.0
READY_S: Final = 60.0

Role = Callable[[Client, "Options"], Coroutine[Any, Any, None]]


class Options(NamedTuple):
    directory: str  # of the tokenizer
    port: int  # of the frontend
    step_s: float


class Tasks:
    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)


async def frontend(client: Client, options: Options) -> None:
    text, numbers = TextModel.load(Path(options.directory)), count()
    streams: dict[int, asyncio.Queue[tuple[list[int], bool]]] = {}

    async def receive_frame(message: Msg) -> None:
        for stream_id, token_ids, is_last in msgpack.unpackb(message.data):
            streams[stream_id].put_nowait((token_ids, is_last))

    async def app(scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body = await read_body(receive)
        if scope["method"] != "POST":
            await begin(send, b"application/json")
            await send({"type": "http.response.body", "body": b'{"data": [{"id": "floor"}]}'})
            return
        asked = json.loads(body)
        token_ids, stream_id = await text.encode_chat(asked["messages"]), next(numbers)
        streams[stream_id] = asyncio.Queue()
        await client.publish("decode", msgpack.packb((stream_id, token_ids, asked["max_tokens"])))
        await begin(send, b"text/event-stream")
        detokenizer, is_last, num_tokens = text.detokenizer(), False, 0
        while not is_last:
            new_ids, is_last = await streams[stream_id].get()
            num_tokens += len(new_ids)
            choice = {"index": 0, "delta": {"content": detokenizer.feed(new_ids)}}
            data = b'data: {"choices":[%s]}\n\n' % json.dumps(choice).encode()
            if is_last:
                usage = len(token_ids), num_tokens
                data += b'data: {"choices":[],"usage":{"prompt_tokens":%d,"completion_tokens":%d}}\n\n' % usage
                data += b"data: [DONE]\n\n"
            await send({"type": "http.response.body", "body": data, "more_body": not is_last})
        del streams[stream_id]

    await client.subscribe(FRAMES, cb=receive_frame)
    config = uvicorn.Config(app, port=options.port, http="httptools", log_level="warning", access_log=False)
    await uvicorn.Server(config).serve()


async def read_body(receive: Any) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    return body


async def begin(send: Any, kind: bytes) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})


async def decode(client: Client, options: Options) -> None:
    loop, rooms, tasks = asyncio.get_running_loop(), count(), Tasks()
    left: dict[int, int] = {}  # tokens left of each stream
    frame: dict[int, list[Any]] = {}
    sent_s = 0.0

    async def serve(data: bytes) -> None:
        stream_id, token_ids, max_tokens = msgpack.unpackb(data)
        await client.request("prefill", msgpack.packb((next(rooms), token_ids, PROMPT_PAGES)), timeout=ANSWER_S)
        left[stream_id] = max_tokens
        if len(left) == 1:
            loop.call_soon(step)

    def step() -> None:
        nonlocal sent_s
        for stream_id in list(left):
            left[stream_id] -= 1
            gathered = frame.setdefault(stream_id, [stream_id, [], False])
            gathered[1].append(1000 + left[stream_id])
            if not left[stream_id]:
                gathered[2] = True
                del left[stream_id]
        if not left or loop.time() - sent_s >= FRAME_INTERVAL_S:
            sent_s = loop.time()
            tasks.start(client.publish(FRAMES, msgpack.packb(list(frame.values()))))
            frame.clear()
        if left and options.step_s:
            loop.call_later(options.step_s, step)
        elif left:
            loop.call_soon(step)

    async def start(message: Msg) -> None:
        tasks.start(serve(message.data))

    await client.subscribe("decode", cb=start)
    await asyncio.Event().wait()


async def prefill(client: Client, _: Options) -> None:
    tasks = Tasks()

    async def serve(message: Msg) -> None:
        room, _token_ids, pages = msgpack.unpackb(message.data)
        await client.request("bootstrap", msgpack.packb((room, pages)), timeout=ANSWER_S)
        await message.respond(msgpack.packb(room))

    async def start(message: Msg) -> None:
        tasks.start(serve(message))

    await client.subscribe("prefill", cb=start)
    await asyncio.Event().wait()


async def bootstrap(client: Client, _: Options) -> None:
    async def serve(message: Msg) -> None:
        await message.respond(msgpack.packb(msgpack.unpackb(message.data)))

    await client.subscribe("bootstrap", cb=serve)
    await asyncio.Event().wait()


ROLES: Final[Sequence[Role]] = (bootstrap, prefill, decode, frontend)


def process(role: Role, url: str, options: Options) -> None:
    async def work() -> None:
        client = await nats.connect(url)
        settle()
        await role(client, options)

    run(work())


@contextmanager
def floor(directory: str, port: int, step_s: float) -> Iterator[dict[str, list[int]]]:
    """Returns: pids by name."""
    options, context = Options(directory, port, step_s), get_context("spawn")
    with tempfile.TemporaryDirectory() as home, asyncio.Runner() as runner, ExitStack() as stack:
        nats_server = running(NATS, Path(home))
        server = runner.run(nats_server.__aenter__())
        stack.callback(lambda: runner.run(nats_server.__aexit__(None, None, None)))
        assert server.process is not None
        pids = {"nats-server": [server.process.pid]}
        for role in ROLES:
            child = context.Process(target=process, args=(role, server.url, options), daemon=True)
            child.start()
            stack.callback(child.join)
            stack.callback(child.terminate)
            pids[role.__name__] = [child.pid or 0]
        runner.run(_answers(port))
        yield pids


async def _answers(port: int) -> None:
    try:
        async with asyncio.timeout(READY_S):
            while True:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                except OSError:
                    await asyncio.sleep(0.1)
                else:
                    writer.close()
                    return
    except TimeoutError:
        sys.exit(f"the floor's frontend does not listen after {READY_S:g} s")


def main(
    concurrency: Concurrency = [1, 16, 64],  # noqa: B006
    rounds: Rounds = 3,
    seconds: Annotated[float, typer.Option(help="for each number of clients and turn")] = 4.0,
    input_len: Annotated[
        int, typer.Option(help="words of the prompt, a token each; the chat template adds some")
    ] = 200,
    output_len: OutputLen = 64,
    step_ms: Annotated[float, typer.Option(help="of the floor's engine; 0: as fast as it can")] = 0.0,
    model: Annotated[str, typer.Option(help="whose tokenizer")] = "smollm2-135m",
) -> None:
    ports = {KVMESH: free_port(), FLOOR: free_port()}
    lines: list[dict[str, Any]] = []
    with ExitStack() as stack:
        server = stack.enter_context(mesh(f"mock:{model}", {"prefill": 1, "decode": 1}, mock_env(1, {}), ports[KVMESH]))
        pids: dict[str, Mapping[str, Sequence[int]]] = {KVMESH: server.processes()}
        pids[FLOOR] = stack.enter_context(floor(model_directory(model), ports[FLOOR], step_ms / 1000))
        runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        prompts = {name: Prompts(model_name(port), input_len, output_len) for name, port in ports.items()}
        for name, port in ports.items():
            runner.run(measure(port, prompts[name], {}, concurrency=8, seconds=WARM_UP_S))
        for number in range(rounds):
            for clients in concurrency:
                for name in list(ports) if number % 2 == 0 else reversed(ports):
                    watched = {"client": [os.getpid()], **pids[name]}
                    measured = runner.run(measure(ports[name], prompts[name], watched, clients, seconds))
                    if measured.failed:
                        sys.exit(f"{name}: {measured.failed} requests failed: {measured.last_words}")
                    line = figures(measured, output_len, label=name, concurrency=clients, step_ms=step_ms)
                    spent_s = sum(used_s for who, used_s in measured.cpu_s.items() if who != "client")
                    line["servers_cpu_ms_per_request"] = round(1000 * spent_s / len(measured.ttft_s), 2)
                    lines.append(line)
                    print(json.dumps(line), flush=True)
    for clients in concurrency:
        print(json.dumps(compare(lines, (KVMESH, FLOOR), clients, (), COMPARED)), flush=True)


if __name__ == "__main__":
    typer.run(main)
