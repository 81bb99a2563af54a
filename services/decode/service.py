"""The NATS endpoints of a decode instance, and the load that it reports."""

import asyncio
import logging

from components.discovery.registry import Registration
from components.errors import Cancelled, DeadlineExceeded, PeerLost, Rejected
from components.messaging.call_server import Endpoint
from components.messaging.heartbeat_sender import heartbeat_of
from components.messaging.outbox import OutStream
from components.telemetry.figures import Figures, Queue, queues_of
from components.telemetry.spans import tracer
from components.telemetry.worker_metrics import WorkerMetrics
from components.wire.generate import MAX_STREAM_ID, CancelStreams, GenerateAccepted, GenerateRequest, StreamsCancelled
from components.wire.heartbeat import Heartbeat
from components.wire.prefill import KvComing, RoomFailed, RoomOk
from components.wire.tokens import unpack_tokens
from engine.sampling.bounds import check_branches
from services.decode.embedding import EmbeddingService
from services.decode.requests import ActiveRequest
from services.decode.runner import RequestRunner
from services.worker_requests import check_adapter, check_addressed, check_model

log = logging.getLogger(__name__)


class DecodeService:
    def __init__(
        self, registration: Registration, runner: RequestRunner, *, model: str, metrics: WorkerMetrics
    ) -> None:
        self._registration = registration
        self._runner = runner
        self._engine = runner.engine
        self._prefill = runner.prefill
        self._prefills = runner.prefills
        self._active = runner.active
        self._metrics = metrics
        self._model = model
        self._num_accepted = 0
        self.draining = False
        self.embedding = EmbeddingService(registration, runner.engine, model, lambda: self.draining)
        self._active.outbox.on_gone(self._frontend_gone)
        self._prefills.alive.on_lost(self._prefill.instance_lost)

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("generate", GenerateRequest, self.generate, runs_inline=True),
            Endpoint("cancel", CancelStreams, self.cancel, runs_inline=True),
            self._active.outbox.endpoint(),
            Endpoint("room_failed", RoomFailed, self.room_failed, runs_inline=True),
            Endpoint("kv_coming", KvComing, self.kv_coming, runs_inline=True),
            self._runner.choice.endpoint(),
            *self.embedding.endpoints(),
        ]

    async def generate(self, request: GenerateRequest) -> GenerateAccepted:
        """Accept a request; its tokens follow as frames. Raises: MeshError; the frontend then tries another instance."""
        left_s = check_addressed(request, self._registration, draining=self.draining)
        check_model(request.model, self._model)
        check_adapter(request.adapter, self._engine.engine.adapters, self._model)
        engine_id = f"{request.request_id}.{request.stream_id}"
        if (running := self._active.find(engine_id)) is not None:
            if running.request.reply_to != request.reply_to:
                raise Rejected(f"request id {engine_id!r} is in use", param="request_id")
            # The answer was lost in a NATS outage, and the frontend has sent the request again in another call.
            return GenerateAccepted(request_id=request.request_id, number=self._num_accepted)
        check_branches(request.sampling)
        num_branches = request.sampling.n
        if not 0 <= request.stream_id <= MAX_STREAM_ID - num_branches:
            raise Rejected(f"stream id {request.stream_id} is out of range", param="stream_id")
        stream_ids = range(request.stream_id, request.stream_id + num_branches)
        if any(self._active.of_stream(request.reply_to, stream_id) is not None for stream_id in stream_ids):
            raise Rejected(f"stream id {request.stream_id} is in use", param="stream_id")
        active = ActiveRequest(
            engine_id=engine_id,
            request=request,
            token_ids=unpack_tokens(request.token_ids),
            prediction=unpack_tokens(request.prediction),
            blocks=self._engine.engine.prompt_blocks(request.token_ids, request.cache_salt, request.adapter),
            streams={i: OutStream(request.reply_to, stream_id) for i, stream_id in enumerate(stream_ids)},
            span=tracer.start_called_span("decode.request", self._registration.instance_id),
            lifecycle=self._active.lifecycle(engine_id),
        )
        active.span.set_attributes(
            {"kvmesh.decode.instance": self._registration.instance_id, "kvmesh.prompt_tokens": len(active.token_ids)}
        )
        # Enforce the deadline here as well, because a frontend that has died sends no cancel.
        expired = DeadlineExceeded("the request's deadline passed")
        active.expiry = asyncio.get_running_loop().call_later(left_s, self._runner.stop, active, expired)
        self._active.add(active)
        self._num_accepted += 1
        self._runner.start(active)
        return GenerateAccepted(request_id=request.request_id, number=self._num_accepted)

    async def cancel(self, request: CancelStreams) -> StreamsCancelled:
        count = 0
        for stream_id in request.stream_ids:
            found = self._active.of_stream(request.reply_to, stream_id)
            if found is not None:
                self._runner.stop_branch(*found)
                count += 1
        return StreamsCancelled(count=count)

    async def room_failed(self, failed: RoomFailed) -> RoomOk:
        self._prefill.room_failed(failed)
        return RoomOk(room=failed.room)

    async def kv_coming(self, coming: KvComing) -> RoomOk:
        self._prefill.kv_coming(coming)
        self._runner.kv_coming(coming)
        return RoomOk(room=coming.room)

    def heartbeat(self) -> Heartbeat:
        me = self._registration
        return heartbeat_of(
            me.instance_id,
            me.epoch,
            self._engine.stats,
            self._runner.prompts(),
            draining=self.draining,
            is_stepping=self._engine.is_stepping,
            accepted=self._num_accepted,
            num_requests=sum(len(active.streams) for active in self._active.all()) + len(self.embedding),
        )

    def show(self, figures: Figures) -> None:
        figures.is_draining = lambda: self.draining
        figures.queues = self._queues
        figures.rooms = self._prefill.rooms
        figures.breakers = self._breakers
        figures.heartbeat_ages_s = self._prefills.alive.ages_s
        self._metrics.num_exposed_pages = lambda: self._prefill.num_exposed_pages

    def _queues(self) -> dict[str, Queue]:
        """Queues by name. A request whose transfer is in progress counts only in the transfer's queue."""
        alone = (one.lifecycle for one in self._active.all() if not self._prefill.is_under_way(one.engine_id))
        return queues_of(alone, self._active.tally.states) | self._prefill.queues()

    def _breakers(self) -> dict[str, str]:
        prefills = {i: str(state) for i, state in self._prefills.router.health.states().items()}
        return prefills | self._prefill.bootstrap_breakers()

    async def drained(self) -> None:
        await self._runner.drained()
        await self.embedding.drained()

    def _frontend_gone(self, reply_to: str) -> None:
        streams = self._active.of_frontend(reply_to)
        if streams:
            log.warning("frontend is gone, ending its streams", extra={"subject": reply_to, "streams": len(streams)})
        for active in streams:
            self._runner.stop(active, Cancelled("the frontend has gone"))

    def stop_all(self, cause: str) -> None:
        for active in self._active.all():
            self._runner.stop(active, PeerLost(cause))
        self.embedding.stop_all(cause)
