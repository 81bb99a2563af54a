"""One request that generates text, from the first header to the last byte."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final
from uuid import uuid4

from starlette.types import Receive, Scope, Send

from components.errors import Rejected
from components.http.connection import PUSH
from components.openai.errors import ApiError
from components.openai.fields import AskedConstraint, GenerationFields
from components.structured.check_constraint import Unusable
from components.structured.checker import ConstraintChecker
from components.telemetry.spans import exemplar_of
from components.text.sampling_defaults import SamplingDefaults
from components.text.tokenizer import TextModel
from components.wire.sampling import Constraint
from services.frontend import tracing
from services.frontend.admission import Admission
from services.frontend.answer_form import error_of
from services.frontend.choice import TextDelta
from services.frontend.config import FrontendSettings
from services.frontend.dialects.dialect import Dialect, EventStream
from services.frontend.fair_queue import AdmissionTicket
from services.frontend.gate import UNKNOWN_CALLER, Caller, caller_of
from services.frontend.generation import Generation
from services.frontend.incoming import Body, cancelled_on_disconnect, limited_time, read_json_body
from services.frontend.metrics import NO_MODEL, FrontendMetrics
from services.frontend.ports import Mesh, Prompt, ServedModel
from services.frontend.prompts import check_prediction, check_token_fields, find_generator, make_prompt, token_budget
from services.frontend.reply import Reply
from services.frontend.request_lines import RequestLines
from services.frontend.request_timeline import RequestTimeline

SSE_COMMENT: Final = b": keep-alive\n\n"  # clients ignore it


@dataclass(frozen=True, slots=True)
class Frontend:
    mesh: Mesh
    text: TextModel
    settings: FrontendSettings
    defaults: SamplingDefaults
    metrics: FrontendMetrics
    admission: Admission
    checker: ConstraintChecker | None = None
    lines: RequestLines = field(default_factory=RequestLines)


class Exchange:
    """An ASGI application for one request. `__call__` holds its timeline, its time limit and its error handling.

    An error before the first token sets the HTTP status; a later one becomes the stream's last event. So does an error
    after a comment that keeps the connection alive.
    """

    def __init__(self, frontend: Frontend, dialect: Callable[[str], Dialect]) -> None:
        self._frontend = frontend
        self._request_id = uuid4().hex  # ours: the client's X-Request-Id is never a key
        self._dialect = dialect(self._request_id)
        self._events: EventStream | None = None  # None: not a stream, or not read yet
        self._timeline: RequestTimeline
        self._caller: Caller = UNKNOWN_CALLER
        self._model = NO_MODEL
        self._generation: Generation | None = None
        self._awaits_first_token = True
        self._counted_prompt_tokens = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._caller = caller_of(scope)
        headers = self._dialect.headers(self._caller.label or self._request_id)
        reply = Reply(send, headers, scope.get(PUSH))
        self._timeline = tracing.begin_timeline(
            scope, self._dialect.operation, self._request_id, self._caller.label, "frontend.validate"
        )
        with self._timeline:
            try:
                # the mesh enforces the deadline of the generation; this limit also covers a client that stops reading
                async with limited_time(self._frontend.settings.request_timeout_s):
                    await self._serve(scope, receive, reply)
            except Exception as exc:  # noqa: BLE001 - bugs are logged by `error_of`
                await self._fail(reply, error_of(exc, self._request_id), exc)
            finally:
                self._account(reply)

    async def _serve(self, scope: Scope, receive: Receive, reply: Reply) -> None:
        data = await read_json_body(scope, receive, self._frontend.settings.max_body_bytes)
        request = await self._dialect.read(Body(data, self._frontend.text), scope)
        limit = self._dialect.token_limit()
        check_token_fields(request, self._frontend.text.vocab_size)
        model = find_generator(self._frontend.mesh, request.model)
        self._model = model.name
        self._timeline.begin("frontend.tokenize")
        tracing.describe_request(self._timeline, self._dialect.operation, request, limit)
        with self._frontend.metrics.running.labels(model.name).track_inprogress():
            async with cancelled_on_disconnect(receive, lambda: reply.answered):
                prompts = await self._prepare(request, model, limit)
                prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
                ticket = self._caller.enter(
                    self._frontend.admission,
                    self._frontend.metrics,
                    priority=prompts[0].priority,
                    prompt_tokens=prompt_tokens,
                    choices=sum(prompt.sampling.n for prompt in prompts),
                )
                try:
                    await self._generate(reply, request, prompts, ticket)
                finally:
                    admission, answer_tokens = self._frontend.admission, self._num_generated
                    self._caller.leave(admission, ticket, prompt_tokens=prompt_tokens, answer_tokens=answer_tokens)

    async def _generate(
        self, reply: Reply, request: GenerationFields, prompts: list[Prompt], ticket: AdmissionTicket
    ) -> None:
        frontend, gaps = self._frontend, self._frontend.metrics.gaps.of(self._model)
        generation = Generation(frontend.mesh, frontend.text, prompts, gaps, partial(self._began, ticket))
        if request.stream:
            self._events = self._dialect.events(generation)
        async with self._dialect.underway(reply, generation):
            if ticket.admission_result is not None:
                self._timeline.begin("frontend.admit")
                await self._keeping_alive(reply, ticket.admitted())
            self._generation = generation
            self._timeline.pause()
            if self._events is not None:
                await self._stream(reply, generation, self._events)
            else:
                await self._collect(reply, generation)

    def _began(self, ticket: AdmissionTicket, prompt_tokens: int, cached_tokens: int) -> None:
        self._frontend.admission.began(ticket, prompt_tokens)
        if prompt_tokens:
            self._count_prompts(prompt_tokens)
            self._frontend.metrics.cached_tokens += cached_tokens

    def _count_prompts(self, tokens: int) -> None:
        self._frontend.metrics.prompt_tokens.labels(self._model).inc(tokens)
        self._counted_prompt_tokens += tokens

    async def _prepare(self, request: GenerationFields, model: ServedModel, limit: int | None) -> list[Prompt]:
        frontend, dialect = self._frontend, self._dialect
        deadline_unix_ms = int((time.time() + frontend.settings.request_timeout_s) * 1000)
        priority = self._caller.priority(request.priority, frontend.settings.best_priority)
        salt = self._caller.cache_salt(request.cache_salt, shared=frontend.settings.share_prefix_cache)
        encoded = await dialect.encode(frontend.text)
        budgets = [token_budget(len(ids), limit, model, dialect.prompt_param) for ids in encoded.prompts]
        check_prediction(encoded.prediction, model)
        asked = encoded.asked or request.asked_constraint
        constraint = None if asked is None else await self._checked(asked)
        num = len(encoded.prompts)
        names = [self._request_id] if num == 1 else [f"{self._request_id}-{i}" for i in range(num)]
        return [
            make_prompt(
                name,
                request,
                ids,
                max_tokens=budget,
                deadline_unix_ms=deadline_unix_ms,
                priority=priority,
                cache_salt=salt,
                defaults=frontend.defaults,
                constraint=constraint,
                prediction=encoded.prediction,
                echo=echo,
                output=encoded.output,
            )
            for name, ids, budget, echo in zip(
                names, encoded.prompts, budgets, encoded.echoes or [""] * num, strict=True
            )
        ]

    async def _checked(self, asked: AskedConstraint) -> Constraint:
        """Compile the constraint. Raises: Rejected, naming the field, if it is not supported; TooManyChecks."""
        if self._frontend.checker is None:
            raise Rejected(f"'{asked.param}' is not supported by this server.", param=asked.param)
        self._timeline.begin("frontend.compile")
        try:
            return await self._frontend.checker.check(asked.constraint, self._caller.queue_key)
        except Unusable as exc:
            raise Rejected(f"Invalid '{asked.param}': {exc}.", param=asked.param, code="invalid_value") from exc

    async def _stream(self, reply: Reply, generation: Generation, events: EventStream) -> None:
        def show(piece: TextDelta, is_last: bool) -> bool:
            data = events.piece(piece)
            if is_last:  # sent together with the events of `end`
                reply.hold_final_events(data)
                return False
            if data and self._awaits_first_token:  # wakes `_stream`, even after comments
                reply.hold(data)
                return False
            return not data or reply.write(data)

        async with generation.running(show):
            is_over = False
            while not is_over:
                await self._keeping_alive(reply, generation.woken())
                is_over = generation.is_over
                if is_over:
                    reply.hold_final_events(await events.end())
                is_first = self._begin_first_token(generation)
                await reply.flush(last=is_over)
                if is_first:
                    self._first_token_sent()

    async def _keeping_alive(self, reply: Reply, wait: Coroutine[Any, Any, None]) -> None:
        """Wait. In a stream that is silent for too long meanwhile, send comments, so that no proxy closes it."""
        interval_s = self._frontend.settings.keep_alive_s
        if self._events is None or not interval_s:
            await wait
            return
        task = asyncio.create_task(wait)
        try:
            while not task.done():
                sent = self._num_generated
                await asyncio.wait({task}, timeout=interval_s)
                if not task.done() and self._num_generated == sent and not reply.write(SSE_COMMENT):
                    await reply.flush()
        finally:
            task.cancel()
        await task

    async def _collect(self, reply: Reply, generation: Generation) -> None:
        pieces: list[list[TextDelta]] = [[] for _ in generation.choices]

        def show(piece: TextDelta, _: bool) -> bool:
            pieces[piece.choice].append(piece)
            return not self._awaits_first_token

        async with generation.running(show):
            while not generation.is_over:
                await generation.woken()
                if self._begin_first_token(generation):
                    self._first_token_sent()
        answer = await self._dialect.answer(pieces, generation)
        if not reply.answered:
            await reply.parts(answer)

    @property
    def _num_generated(self) -> int:
        return 0 if self._generation is None else self._generation.num_generated

    def _begin_first_token(self, generation: Generation) -> bool:
        """Begin the phase `first_token` when the first token arrives. Returns False if a token was sent before."""
        is_first, self._awaits_first_token = self._awaits_first_token, False
        if is_first:
            self._timeline.first_ns = generation.first_unix_ns
            self._timeline.begin("frontend.first_token", generation.first_unix_ns)
        return is_first

    def _first_token_sent(self) -> None:
        ttft = self._frontend.metrics.time_to_first_token.labels(self._model, self._dialect.route)
        ttft.observe(self._timeline.first_token_sent(), exemplar_of(self._timeline.root))

    async def _fail(self, reply: Reply, error: ApiError, exc: Exception) -> None:
        tracing.describe_error(self._timeline, error, exc)
        status, body = self._dialect.refusal(error)
        events = self._events.fail(error) if self._events is not None and reply.streaming else b""
        await reply.fail(status, body, error.headers(), events)

    def _account(self, reply: Reply) -> None:
        """Count the request, and end its timeline."""
        timeline, metrics = self._timeline, self._frontend.metrics
        route, generation = self._dialect.route, self._generation
        status = reply.status
        metrics.requests.labels(self._model, route, str(status)).inc()
        duration_s = timeline.seconds()
        if metrics.server is not None:
            metrics.server.served(
                self._dialect.operation,
                self._model,
                duration_s=duration_s,
                ttft_s=timeline.ttft_s,
                num_tokens=self._num_generated,
                error=timeline.error or None,
            )
        tokens: dict[str, int] = {}
        if generation is not None:
            usage = generation.usage()
            cached = usage.prompt_tokens_details.cached_tokens
            tokens = {
                "prompt_tokens": usage.prompt_tokens,
                "output_tokens": usage.completion_tokens,
                "cached_tokens": cached,
            }
            timeline.longest_gap_s = generation.longest_gap_s()
            tracing.describe_response(timeline, self._dialect.response_id, self._model, generation)
            self._count_prompts(usage.prompt_tokens - self._counted_prompt_tokens)  # those without an answer
            if (account := self._caller.account) is not None:
                account.take(usage.completion_tokens)
                metrics.key_tokens.labels(account.name, "prompt").inc(usage.prompt_tokens)
                metrics.key_tokens.labels(account.name, "answer").inc(usage.completion_tokens)
            if status == 200:
                metrics.e2e_latency.labels(self._model, route).observe(duration_s, exemplar_of(timeline.root))
                for choice in (choice for choice in generation.choices if choice.finish is not None):
                    metrics.success.labels(self._model, str(choice.finish)).inc()
        self._frontend.lines.end(timeline, route, self._model, status, label=self._caller.label, **tokens)
