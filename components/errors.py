"""One tree of errors, cut by what the caller does next. HTTP codes come from the one table in `components/openai`.

An error that crosses a process travels as `components.wire.refused.Refused` and is raised again on the other side as
the same class, so a class name is part of the wire format: rename one only together with a new message tag.
"""

from typing import ClassVar


class MeshError(Exception):
    """Base of everything kvmesh raises on purpose; `fields` are facts for the log and the span, never prose."""

    retryable: ClassVar[bool] = False

    def __init__(self, message: str, /, **fields: str | int | float | None) -> None:
        super().__init__(message)
        self.message = message
        self.fields = fields


class Rejected(MeshError):
    """The request is wrong: fix it and send it again. `param` names the offending field where there is one."""


class PromptTooLong(Rejected):
    """Prompt plus requested tokens exceed the model's context or the worker's whole KV pool."""


class UnknownModel(Rejected):
    """No registered instance serves the model named."""


class UnknownResponse(Rejected):
    """No response is stored under this id, or another client's."""


class MessageTooLarge(Rejected):
    """A message exceeds the NATS server's `max_payload`; refused at the sender."""


class MalformedMessage(Rejected):
    """Bytes from the mesh that are not a message of the type expected; counted, dropped, never fatal."""


class IncompatibleLayout(Rejected):
    """Prefill and decode do not agree on model or KV layout; refused before any byte moves, both values named."""


class Overloaded(MeshError):
    """Nobody can take the request now: come back after `retry_after_s`."""

    retryable = True

    def __init__(self, message: str, /, *, retry_after_s: float = 1.0, **fields: str | int | float | None) -> None:
        super().__init__(message, retry_after_s=retry_after_s, **fields)
        self.retry_after_s = retry_after_s


class NoDecodeInstance(Overloaded):
    """No live decode instance serves the model."""


class NoPrefillInstance(Overloaded):
    """No live prefill instance; decode computes the prompt itself, so a client never sees this."""


class NoBootstrapInstance(Overloaded):
    """No live bootstrap replica; decode computes the prompt itself, so a client never sees this."""


class QueueFull(Overloaded):
    """A bounded queue is full, or somebody has waited in it for too long."""


class TooManyChecks(QueueFull):
    """Of one caller, or of all, too many constraints are waiting to be checked."""


class KeyLimited(Overloaded):
    """The API key has used what it may for now; `kind` is what of: requests or tokens."""


class PeerLost(MeshError):
    """The other side is gone or silent: retry elsewhere, if no token went out."""

    retryable = True


class NobodyListens(PeerLost):
    """NATS finds nobody under the name of the other side: it has ended, or is reconnecting. Nothing has reached it."""


class PrefillLost(PeerLost):
    """The prefill instance of a transfer is gone."""


class DecodeLost(PeerLost):
    """The decode instance of a stream is gone or silent."""


class FramesLost(DecodeLost):
    """Tokens of a stream got lost on their way and cannot be sent again; its decode instance is well."""


class TransferFailed(PeerLost):
    """KV did not arrive whole; nothing of it may be used."""


class KvCorrupt(TransferFailed):
    """KV arrived, but not as it was sent."""


class StaleInstance(PeerLost):
    """The message quotes an epoch that the instance no longer has."""


class KvUnavailable(MeshError):
    """A prompt's KV did not come from prefill, and decode is told to fail then; `cause` names the class of what happened.

    No PeerLost: who asks for failures wants to see them, so nothing moves elsewhere.
    """


class BackendUnavailable(MeshError):
    """etcd or NATS cannot be reached, or a KV transfer backend not be used: the message gives the cause and what to do."""

    retryable = True


class DeadlineExceeded(MeshError):
    """Give up; the work is already cancelled."""


class Cancelled(MeshError):
    """The client has gone or asked to stop; whoever still works on the request stops too."""


class InvariantBroken(MeshError):
    """Our bug."""


class IllegalTransition(InvariantBroken):
    """A lifecycle was asked to make a move that its table does not have."""


class PageLeak(InvariantBroken):
    """free + cached + held pages no longer equal the pool."""


class PeerBroken(InvariantBroken):
    """Another process reports an InvariantBroken: a defect of its own or of its device, or a request that breaks it.

    It counts for that instance's breaker. The request is sent to at most one other instance.
    """


class NonFiniteLogits(PeerBroken):
    """The model computed NaN or infinity for the request: a defect of the model or its device, or a prompt that breaks it."""


def _subclasses(cls: type[MeshError]) -> list[type[MeshError]]:
    return [cls, *(deep for child in cls.__subclasses__() for deep in _subclasses(child))]


BY_NAME: dict[str, type[MeshError]] = {cls.__name__: cls for cls in _subclasses(MeshError)}


def reported(name: str, unknown: type[MeshError] = PeerBroken) -> type[MeshError]:
    """The class to raise for an error that another process reports as `name`; `unknown` if this process has no such class.

    A defect of another process is not one of ours: InvariantBroken becomes PeerBroken.
    """
    cls = BY_NAME.get(name, unknown)
    if issubclass(cls, PeerBroken):
        return cls
    return PeerBroken if issubclass(cls, InvariantBroken) else cls
