"""A client that calls the frontend's ASGI application in memory."""

import asyncio
import json
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Final

from tests.faults.clients import Answer, Client
from tests.faults.nodes import Frontend

PART_S: Final = 0.0005  # between two parts of the body
DONE: Final = "[DONE]"
BYTES: Final = 256  # the mock's other tokens show as no text
Facts = MutableMapping[str, Any]


@dataclass(eq=False)
class HttpClient(Client):
    """One request by HTTP. Its response must end exactly once: with the whole answer, or with one error."""

    streams: bool = True
    status: int = field(default=0, init=False)
    texts: dict[int, str] = field(default_factory=dict, init=False)  # by choice
    finishes: dict[int, str] = field(default_factory=dict, init=False)
    _parts: list[bytes] = field(default_factory=list, init=False)
    _headers: dict[str, str] = field(default_factory=dict, init=False)
    _received: bytes = field(default=b"", init=False)
    _is_over: bool = field(default=False, init=False)  # the last part of the body has arrived
    _gone: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _stalls_until_s: float = field(default=0.0, init=False)
    _protocol: list[str] = field(default_factory=list, init=False)  # violations of ASGI

    @property
    def has_begun(self) -> bool:
        return all(self.texts.get(choice) for choice in range(len(self.prompts)))

    @property
    def lacks_kv(self) -> bool:
        return self.error is not None and self.error["code"] == "kv_transfer_failed"

    def __str__(self) -> str:
        how = "streams" if self.streams else "waits"
        return f"client {self.number} {how}: {self.status} {self.texts}, {self.finishes}, {self.error}"

    async def run(self, frontend: Frontend) -> None:
        self.received_s = asyncio.get_running_loop().time()
        self._parts = self._body()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % sum(map(len, self._parts)))]
        path = "/v1/completions"
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": headers,
            "client": ("client", self.number),
            "server": ("frontend", 80),
        }
        try:
            await frontend.app(scope, self._receive, self._send)
        finally:
            self.end_silence()

    def leave(self) -> None:
        self.has_left = True
        self._gone.set()

    def stall(self, seconds: float) -> bool:
        self.has_stalled = True
        self._stalls_until_s = asyncio.get_running_loop().time() + seconds
        return True

    def problems(self, answers: list[Answer], *, broken: bool) -> list[str]:
        assert self.task is not None
        if not self.task.done():
            return [] if self.has_left else ["hangs"]
        if self.task.cancelled() or self.task.exception() is not None:
            return [] if self.has_left else [f"{self.task}"]
        found = list(self._protocol)
        found += self._read_events() if self._headers.get("content-type", "").startswith("text/event") else self._read()
        for choice, text in self.texts.items():
            whole = _text(answers[choice].tokens)
            if not whole.startswith(text) or (choice in self.finishes and text != whole):
                found.append(f"choice {choice} is {text!r}, expected {whole!r}")
        right = {choice: answer.finish for choice, answer in enumerate(answers)}
        if any(right[choice] != finish for choice, finish in self.finishes.items()):
            found.append(f"finished by {self.finishes}, expected {right}")
        if self.has_left:
            return found
        is_whole = len(self.finishes) == len(answers)
        if is_whole == (self.error is not None):
            found.append(f"{self.finishes} and {self.error}: not exactly one of an answer and an error")
        if not self._is_over:
            found.append("the response has no end")
        return found + ([f"{self.error}"] if self.status >= 500 and self._is_bug() and not broken else [])

    def _is_bug(self) -> bool:
        return self.error is not None and self.error["code"] == "internal_error"

    def _body(self) -> list[bytes]:
        """Make the body, in two parts. A prompt is text or tokens, which are equal to the mock."""
        as_text = self.number % 3 == 0
        prompts = [_text(prompt) if as_text else prompt for prompt in self.prompts]
        body = {
            "model": self.model,
            "prompt": prompts if len(prompts) > 1 else prompts[0],
            "max_tokens": self.sampling.max_tokens,
            "temperature": self.sampling.temperature,
            "seed": self.sampling.seed,
            "stream": self.streams,
        }
        whole = json.dumps(body).encode()
        return [whole[:30], whole[30:]]

    async def _receive(self) -> Facts:
        if self._parts and not self.has_left:
            await asyncio.sleep(PART_S)
        if self._parts and not self.has_left:
            return {"type": "http.request", "body": self._parts.pop(0), "more_body": bool(self._parts)}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Facts) -> None:
        while not self.has_left and (left_s := self._stalls_until_s - asyncio.get_running_loop().time()) > 0:
            await asyncio.sleep(min(left_s, 0.1))
        if self.has_left:  # like uvicorn
            return
        self.end_silence()
        if self._is_over:
            self._protocol.append(f"after the end: {message}")
        elif message["type"] == "http.response.start":
            if self.status:
                self._protocol.append("a second status")
            self.status = message["status"]
            self._headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            if not self.status:
                self._protocol.append("a body without a status")
            self._received += message.get("body", b"")
            self._is_over = not message.get("more_body", False)
            if self._is_over:
                self._gone.set()  # the application cannot tell these apart

    def _read(self) -> list[str]:
        if not self._is_over:
            return []
        found = []
        if len(self._received) != int(self._headers["content-length"]):
            found.append(f"{len(self._received)} bytes, announced {self._headers['content-length']}")
        response = json.loads(self._received)
        if ("error" in response) != (self.status >= 400):
            found.append(f"status {self.status} with {response}")
        self.error = response.get("error")
        for choice in response.get("choices", ()):
            self.texts[choice["index"]] = choice["text"]
            self.finishes[choice["index"]] = choice["finish_reason"]
        return found

    def _read_events(self) -> list[str]:
        found = [] if self.status == 200 else [f"a stream with status {self.status}"]
        last = ""
        for data in self._events():
            response = {} if data == DONE else json.loads(data)
            if last == DONE or (self.error is not None and data != DONE):
                found.append(f"after the end: {data}")
            if "error" in response:
                self.error = response["error"]
            for choice in response.get("choices", ()):
                index = choice["index"]
                if index in self.finishes:
                    found.append(f"after choice {index} had finished: {data}")
                self.texts[index] = self.texts.get(index, "") + choice["text"]
                if choice["finish_reason"] is not None:
                    self.finishes[index] = choice["finish_reason"]
            last = data
        return found if (last == DONE) == self._is_over else [*found, f"the last event is {last}"]

    def _events(self) -> Iterator[str]:
        *whole, rest = self._received.decode().split("\n\n")
        assert not rest or not self._is_over, f"half an event: {rest}"
        for event in whole:
            assert event.startswith("data: "), event
            yield event.removeprefix("data: ")


def _text(tokens: list[int]) -> str:
    return bytes(token for token in tokens if token < BYTES).decode()
