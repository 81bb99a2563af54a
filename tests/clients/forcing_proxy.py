"""A proxy that requires a tool call in an agent's first turn, because a mock engine rarely makes one."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, NamedTuple

import httpx

from tests.waiting import PATIENCE_S


class Forced(NamedTuple):
    """The only arguments that the model can write for a tool."""

    tool: str
    arguments: Mapping[str, str]


class Exchange(NamedTuple):
    """A request for an answer, as the agent sent it, and the status of the answer."""

    body: str
    status: int


class Forcing(NamedTuple):
    url: str
    exchanges: list[Exchange]


@contextmanager
def forcing(mesh: str, forced: Forced) -> Iterator[Forcing]:
    """Run a proxy of `mesh` that forces the first request with tools."""
    exchanges: list[Exchange] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent = self.rfile.read(int(self.headers["content-length"]))
            body = json.loads(sent)
            if body.get("tools") and not any("tools" in json.loads(exchange.body) for exchange in exchanges):
                force(body, forced)
            answer = httpx.post(f"{mesh}{self.path}", json=body, timeout=PATIENCE_S)
            exchanges.append(Exchange(sent.decode(), answer.status_code))
            self.send_response(answer.status_code)
            self.send_header("content-type", answer.headers["content-type"])
            self.send_header("content-length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield Forcing(f"http://127.0.0.1:{server.server_port}", exchanges)
        finally:
            server.shutdown()
            thread.join()


def force(body: dict[str, Any], forced: Forced) -> None:
    """Require a call of the tool, in the form of `/v1/responses` or `/v1/messages`."""
    [tool] = [tool for tool in body["tools"] if tool.get("name") == forced.tool]
    in_responses = "input" in body
    tool["parameters" if in_responses else "input_schema"] = {
        "type": "object",
        "properties": {name: {"const": value} for name, value in forced.arguments.items()},
        "required": list(forced.arguments),
        "additionalProperties": False,
    }
    body["tool_choice"] = {"type": "function" if in_responses else "tool", "name": forced.tool}
