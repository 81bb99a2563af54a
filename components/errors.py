"""All errors, in a tree by what the caller does next. HTTP codes are in the table of `components/openai`.

An error crosses processes as `components.wire.refused.Refused` and is raised again by its class name. So a class name is
part of the wire format: rename one only with a new message tag.
"""

from typing import ClassVar


class MeshError(Exception):
    """Base of all errors of kvmesh. `fields` are facts for the log and the span."""

    retryable: ClassVar[bool] = False

    def __init__(self, message: str, /, **fields: str | int | float | None) -> None:
        super().__init__(message)
        self.message = message
        self.fields = fields


class Rejected(MeshError):
    """The request is wrong: change it before sending it again. The field `param` names the wrong parameter, if there is one."""


class PromptTooLong(Rejected):
    """Prompt and requested tokens exceed the model's context or the worker's KV pages."""


class UnknownModel(Rejected):
    """No registered instance serves the model."""


class UnknownResponse(Rejected):
    """No response is stored under this id, or it belongs to another client."""


class MessageTooLarge(Rejected):
    """A message exceeds the NATS server's `max_payload`; its sender refuses it."""


class MalformedMessage(Rejected):
    """The bytes received are not a message of the expected type. They are counted and dropped."""


class IncompatibleLayout(Rejected):
    """Prefill and decode differ in model or KV layout. The message has both values; no byte has moved."""


class Overloaded(MeshError):
    """No instance can take the request now: try again after `retry_after_s`."""

    retryable = True

    def __init__(self, message: str, /, *, retry_after_s: float = 1.0, **fields: str | int | float | None) -> None:
        super().__init__(message, retry_after_s=retry_after_s, **fields)
        self.retry_after_s = retry_after_s


class NoDecodeInstance(Overloaded):
    """No live decode instance serves the model."""


class NoPrefillInstance(Overloaded):
    """No live prefill instance. Decode computes the prompt itself, so clients never see this."""


class NoBootstrapInstance(Overloaded):
    """No live bootstrap replica. Decode computes the prompt itself, so clients never see this."""


class QueueFull(Overloaded):
    """A queue is full, or the request has waited in it for too long."""


class TooManyChecks(QueueFull):
    """Too many constraints wait to be checked, of one client or of all."""


class KeyLimited(Overloaded):
    """The API key is over its rate limit. The field `kind` says of what: requests or tokens."""


class PeerLost(MeshError):
    """The other side has ended or is silent: retry elsewhere, if no token was sent."""

    retryable = True


class NobodyListens(PeerLost):
    """NATS has no subscriber for the subject: the other side has ended or is reconnecting, and received nothing."""


class PrefillLost(PeerLost):
    """The prefill instance of a transfer has ended."""


class DecodeLost(PeerLost):
    """The decode instance of a stream has ended or is silent."""


class FramesLost(DecodeLost):
    """Tokens of a stream were lost and cannot be sent again. Its decode instance is healthy."""


class TransferFailed(PeerLost):
    """KV did not arrive completely; none of it may be used."""


class KvCorrupt(TransferFailed):
    """KV arrived, but differs from what was sent."""


class StaleInstance(PeerLost):
    """The message has an epoch that the instance no longer has."""


class KvUnavailable(MeshError):
    """KV did not come from prefill, and decode is set to fail then. The field `cause` has the class of the error.

    This is no PeerLost, because it must not be retried: with that setting, users want to see failures.
    """


class BackendUnavailable(MeshError):
    """etcd or NATS is unreachable, or a KV transfer backend unusable. The message has the cause and what to do."""

    retryable = True


class DeadlineExceeded(MeshError):
    """The deadline has passed; the work is already cancelled."""


class Cancelled(MeshError):
    """The client has disconnected or cancelled; all work on the request stops."""


class InvariantBroken(MeshError):
    """A defect of this process."""


class IllegalTransition(InvariantBroken):
    """A lifecycle's table does not have this move."""


class PageLeak(InvariantBroken):
    """Free, cached and held pages no longer add up to the pool."""


class PeerBroken(InvariantBroken):
    """Another process reported an InvariantBroken: a defect of it or of its device, or a request that triggers one.

    It counts for that instance's circuit breaker. The request is sent to at most one other instance.
    """


class NonFiniteLogits(PeerBroken):
    """The model computed NaN or infinity: a defect of the model or its device, or a prompt that triggers one."""


def _subclasses(cls: type[MeshError]) -> list[type[MeshError]]:
    return [cls, *(deep for child in cls.__subclasses__() for deep in _subclasses(child))]


BY_NAME: dict[str, type[MeshError]] = {cls.__name__: cls for cls in _subclasses(MeshError)}


def reported(name: str, unknown: type[MeshError] = PeerBroken) -> type[MeshError]:
    """The class of an error that another process reports as `name`; `unknown` if this process has no such class.

    Another process's InvariantBroken becomes PeerBroken: it is no defect of this one.
    """
    cls = BY_NAME.get(name, unknown)
    if issubclass(cls, PeerBroken):
        return cls
    return PeerBroken if issubclass(cls, InvariantBroken) else cls
