"""Streams through one URL until the standard input closes: `python -m tests.kubernetes.load URL STREAMS`.

Prints a line once the first stream is complete, and at the end a JSON object: the complete streams and the failures.
"""

import asyncio
import json
import os
import sys
from contextlib import suppress
from typing import Any, Final

import httpx

from tests.waiting import PATIENCE_S

TOKENS: Final = 40
LEAST: Final = 12  # streams, however soon the input closes
HOPELESS: Final = 20
PROMPT: Final = "kvmesh moves the pages of a prompt from one worker to another one. " * 3


async def ask(url: str, number: int) -> str:
    """Read a stream on a new connection. Return its fault, or an empty text."""
    body = {
        "model": "mock",
        "messages": [{"role": "user", "content": f"{number} {PROMPT}"}],
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    try:
        async with (
            httpx.AsyncClient(trust_env=False, timeout=PATIENCE_S) as client,
            client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer,
        ):
            if answer.status_code != httpx.codes.OK:
                return f"HTTP {answer.status_code} {(await answer.aread()).decode()[:300]}"
            lines = [line async for line in answer.aiter_lines() if line.startswith("data: ")]
    except httpx.HTTPError as exc:
        return repr(exc)
    events: list[Any] = [json.loads(line.removeprefix("data: ")) for line in lines if line != "data: [DONE]"]
    if lines[-1:] != ["data: [DONE]"]:
        return f"cut off after {len(lines)} events"
    usage = [event["usage"] for event in events if event.get("usage")]
    if not usage or usage[-1]["completion_tokens"] != TOKENS:
        return f"usage {usage}"
    return ""


async def main(url: str, streams: int) -> None:
    done, failed, number, is_closed = 0, list[str](), 0, False

    async def go_on() -> None:
        nonlocal done, number
        while not is_closed or done + len(failed) < LEAST:
            number += 1
            fault = await ask(url, number)
            if fault:
                failed.append(fault)
                if not done and len(failed) > HOPELESS:
                    print(f"no stream is complete: {fault}", flush=True)  # noqa: T201
                    os._exit(1)  # a thread waits for the standard input
            elif not done:
                print("begun", flush=True)  # noqa: T201
            done += not fault
            await asyncio.sleep(0.05)

    async with asyncio.TaskGroup() as group:
        for _ in range(streams):
            group.create_task(go_on())
        await asyncio.to_thread(sys.stdin.read)
        is_closed = True  # streams that have begun are read to their end
    print(json.dumps({"complete": done, "failed": failed}), flush=True)  # noqa: T201


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        asyncio.run(main(sys.argv[1], int(sys.argv[2])))
