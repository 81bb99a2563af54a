"""Embeddings: each text of a call becomes one engine request; the call is answered when all have finished."""

import asyncio
from collections.abc import Callable, Sequence

from components.discovery.registry import Registration
from components.errors import Cancelled, DeadlineExceeded, MeshError, PeerLost, Rejected
from components.messaging.call_server import Endpoint
from components.wire.embed import MAX_TEXTS, CancelEmbed, EmbedCancelled, EmbedRequest, Vectors
from components.wire.sampling import SamplingParams
from components.wire.tokens import unpack_tokens
from engine.loop.engine_loop import EngineLoop
from engine.ports import Engine, EngineRequest, Phase, StepOutput
from services.worker_requests import check_addressed, check_model

NOTHING_DRAWN = SamplingParams(max_tokens=1, temperature=0)


class EmbeddingService:
    def __init__(
        self, registration: Registration, engine: EngineLoop, model: str, is_draining: Callable[[], bool]
    ) -> None:
        self._is_draining = is_draining
        self._registration = registration
        self._engine = engine
        self._model = model
        self._texts: dict[str, asyncio.Future[bytes]] = {}  # by engine id
        self._calls: dict[str, list[str]] = {}  # engine ids of a call's texts, by request id
        self._idle = asyncio.Event()
        self._idle.set()
        engine.on_output(self._stepped)

    def __len__(self) -> int:
        return len(self._texts)

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("embed", EmbedRequest, self.embed, span="decode.embed"),
            Endpoint("cancel_embed", CancelEmbed, self.cancel_embed),
        ]

    async def embed(self, request: EmbedRequest) -> Vectors:
        """Raises: MeshError; the frontend then tries another instance, unless it is Rejected or DeadlineExceeded."""
        left_s = check_addressed(request, self._registration, draining=self._is_draining())
        check_model(request.model, self._model)
        if request.request_id in self._calls:
            raise Rejected(f"request id {request.request_id!r} is in use", param="request_id")
        if len(request.texts) > MAX_TEXTS:
            raise Rejected(f"{len(request.texts)} texts in one message, at most {MAX_TEXTS} are allowed", param="texts")
        texts = [unpack_tokens(text) for text in request.texts]
        ids = [f"{request.request_id}.{i}" for i in range(len(texts))]
        futures = [asyncio.get_running_loop().create_future() for _ in ids]
        self._calls[request.request_id] = ids
        self._texts.update(zip(ids, futures, strict=True))
        self._idle.clear()
        try:
            prompts = [
                EngineRequest(name, tokens, NOTHING_DRAWN, Phase.EMBED, request.cache_salt, priority=request.priority)
                for name, tokens in zip(ids, texts, strict=True)
            ]
            async with asyncio.timeout(left_s):
                await self._engine.between_steps(lambda engine: _submit_all(engine, prompts))
                return Vectors(request_id=request.request_id, vectors=[await future for future in futures])
        except TimeoutError as exc:
            raise DeadlineExceeded("the request's deadline passed") from exc
        finally:
            self._forget(request.request_id)

    async def cancel_embed(self, request: CancelEmbed) -> EmbedCancelled:
        return EmbedCancelled(count=self._fail(request.request_id, Cancelled("the client has gone")))

    async def drained(self) -> None:
        await self._idle.wait()

    def stop_all(self, cause: str) -> None:
        for request_id in list(self._calls):
            self._fail(request_id, PeerLost(cause))

    def _fail(self, request_id: str, error: MeshError) -> int:
        count = 0
        for name in self._calls.get(request_id, ()):
            if not self._texts[name].done():
                self._texts[name].set_exception(error)
                count += 1
        return count

    def _forget(self, request_id: str) -> None:
        """Remove a call, and cancel its texts that have no vector yet."""
        left = []
        for name in self._calls.pop(request_id):
            future = self._texts.pop(name)
            if not future.done() or future.cancelled() or future.exception() is not None:
                left.append(name)
        if left:
            self._engine.between_steps(lambda engine: _cancel_all(engine, left))
        if not self._calls:
            self._idle.set()

    def _stepped(self, output: StepOutput) -> None:
        for done in output.embedded:
            if (future := self._texts.get(done.request_id)) is not None and not future.done():
                future.set_result(done.vector)
        for failed in output.failed:
            if (future := self._texts.get(failed.request_id)) is not None and not future.done():
                future.set_exception(failed.error)


def _submit_all(engine: Engine, prompts: Sequence[EngineRequest]) -> None:
    for prompt in prompts:
        engine.submit(prompt)


def _cancel_all(engine: Engine, request_ids: Sequence[str]) -> None:
    for request_id in request_ids:
        engine.cancel(request_id)
