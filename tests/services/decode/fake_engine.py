"""An engine loop whose engine only records calls; the test makes the steps' outputs."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from components.discovery.book import InstanceBook
from components.wire.layout import KvRegion
from components.wire.logprobs import TokenLogprobs
from components.wire.sampling import SamplingParams
from components.wire.step_stats import StepStats
from components.wire.tokens import PromptBlocks, seed_hash
from engine.ports import EngineRequest, StepOutput, TokenOutput
from tests.components.kv_transfer.fake_transfer import LAYOUT


@dataclass
class FakeEngine:
    """Replaces `engine.ports.Engine`."""

    kv_region: KvRegion = field(default_factory=lambda: KvRegion(0, 100, LAYOUT, "cpu"))
    max_context: int = 1000
    adapters: dict[str, str] = field(default_factory=dict)
    prefix: int = 0  # returned by peek_prefix
    refusal: Exception | None = None  # raised by submit
    delivered: Exception | list[TokenOutput] = field(default_factory=list)  # raised or returned by deliver
    did: list[tuple[Any, ...]] = field(default_factory=list)
    submitted: dict[str, EngineRequest] = field(default_factory=dict)

    def prompt_blocks(self, token_ids: bytes, cache_salt: str = "", adapter: str = "") -> PromptBlocks:
        self.did.append(("blocks", cache_salt, adapter))
        return PromptBlocks(token_ids, seed_hash("m", adapter, cache_salt))

    def peek_prefix(self, blocks: PromptBlocks) -> int:
        return self.prefix

    def submit(self, request: EngineRequest) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.did.append(("submit", request.request_id, request.phase))
        self.submitted[request.request_id] = request

    def deliver(self, request_id: str, first_token: int, logprobs: TokenLogprobs | None = None) -> list[TokenOutput]:
        self.did.append(("deliver", request_id, first_token))
        if isinstance(self.delivered, Exception):
            raise self.delivered
        told = None if logprobs is None else [logprobs]
        return self.delivered or [TokenOutput(request_id, [first_token], logprobs=told)]

    def continues(self, num_tokens: int, sampling: SamplingParams, first_token: int) -> bool:
        return sampling.max_tokens > 1 and first_token not in sampling.stop_token_ids

    def recompute(self, request_id: str, first_token: int | None = None) -> None:
        self.did.append(("recompute", request_id, *(() if first_token is None else (first_token,))))

    def cancel(self, request_id: str, branch: int | None = None) -> None:
        self.did.append(("cancel", request_id, *(() if branch is None else (branch,))))

    def release(self, request_id: str) -> None:
        self.did.append(("release", request_id))


class FakeEngineLoop:
    def __init__(self) -> None:
        self.engine = FakeEngine()
        self.stats = StepStats()
        self.is_stepping = False
        self.callbacks: list[Callable[[StepOutput], None]] = []

    def between_steps(self, call: Callable[[Any], Any], *, light: bool = False) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        loop.call_soon(self._run, call, future)
        return future

    def on_output(self, callback: Callable[[StepOutput], None]) -> None:
        self.callbacks.append(callback)

    def report(self, callback: Callable[[StepOutput], None]) -> None:
        self.callbacks.append(callback)

    def step(self, **output: Any) -> None:
        """Emit the output of a step."""
        for callback in self.callbacks:
            callback(StepOutput(**output))

    def did(self, what: str) -> list[str]:
        """Return the ids of requests with this call."""
        return [entry[1] for entry in self.engine.did if entry[0] == what]

    def _run(self, call: Callable[[Any], Any], future: asyncio.Future[Any]) -> None:
        try:
            result = call(self.engine)
        except Exception as exc:  # noqa: BLE001  as the real loop
            if not future.done():
                future.set_exception(exc)
        else:
            if not future.done():
                future.set_result(result)


@dataclass
class FakeRegistry:
    """A mirror that the test writes."""

    book: InstanceBook = field(default_factory=InstanceBook)
