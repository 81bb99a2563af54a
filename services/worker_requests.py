"""Requests to a worker: the checks that prefill and decode share, and the engine's form of a request."""

from collections.abc import Container, Sequence
from typing import Protocol

from components.discovery.registry import Registration
from components.errors import Overloaded, UnknownModel
from components.messaging.clocks import remaining_s
from components.wire.generate import GenerateRequest
from components.wire.prefill import PrefillRequest
from components.wire.tokens import PromptBlocks
from engine.ports import EngineRequest, Phase, TokenMask


class Addressed(Protocol):
    @property
    def epoch(self) -> str: ...
    @property
    def deadline_unix_ms(self) -> int: ...


def check_addressed(request: Addressed, registration: Registration, *, draining: bool) -> float:
    """Returns the seconds until the request's deadline. Raises: StaleInstance, DeadlineExceeded, Overloaded."""
    registration.check_epoch(request.epoch)
    left_s = remaining_s(request.deadline_unix_ms)
    if draining:
        raise Overloaded("this instance is draining")
    return left_s


def check_model(model: str, served: str) -> None:
    """Raises: UnknownModel."""
    if model != served:
        raise UnknownModel(f"this instance serves {served!r}, not {model!r}")


def check_adapter(adapter: str, known: Container[str], served: str) -> None:
    """Raises: UnknownModel."""
    if adapter and adapter not in known:
        raise UnknownModel(f"this instance has no adapter {adapter!r} of {served!r}")


def engine_request(
    request: GenerateRequest | PrefillRequest,
    engine_id: str,
    token_ids: Sequence[int],
    blocks: PromptBlocks,
    *,
    phase: Phase,
    mask: TokenMask | None = None,
    prediction: Sequence[int] = (),
) -> EngineRequest:
    """`engine_id` is unique within the engine; `token_ids`, `blocks` and `prediction` are the message's, unpacked."""
    return EngineRequest(
        request_id=engine_id,
        token_ids=token_ids,
        sampling=request.sampling,
        phase=phase,
        cache_salt=request.cache_salt,
        num_generated=request.num_generated,
        mask=mask,
        priority=request.priority,
        adapter=request.adapter,
        blocks=blocks,
        prediction=prediction,
    )
