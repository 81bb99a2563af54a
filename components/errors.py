"""All errors, in a tree that is divided by what the caller should do next.

Class names are part of the wire format: rename one only with a new message tag.
"""


class MeshError(Exception):
    """`fields` are facts for the log line and the span."""

    def __init__(self, message: str, /, **fields: str | int | float | None) -> None:
        super().__init__(message)
        self.message = message
        self.fields = fields


class Rejected(MeshError):
    """Change the request before a retry. The field `param` may name the wrong parameter."""


class PromptTooLong(Rejected):
    """Prompt and output exceed the model's context or the worker's KV pages."""


class UnknownModel(Rejected): ...


class UnknownResponse(Rejected):
    """No stored response has this id, or it belongs to another client."""


class MessageTooLarge(Rejected):
    """The message exceeds the NATS server's `max_payload`. The sender raises this, or sends it in place of the message."""


class MalformedMessage(Rejected):
    """A receiver could not read a message; it dropped and counted it."""


class IncompatibleLayout(Rejected): ...


class Overloaded(MeshError):
    """Retry after `retry_after_s`, or elsewhere."""

    def __init__(self, message: str, /, *, retry_after_s: float = 1.0, **fields: str | int | float | None) -> None:
        super().__init__(message, retry_after_s=retry_after_s, **fields)
        self.retry_after_s = retry_after_s


class NoDecodeInstance(Overloaded): ...


class NoBootstrapInstance(Overloaded): ...


class Stopping(Overloaded):
    """This process stops before the request has ended."""


class QueueFull(Overloaded): ...


class TooManyChecks(QueueFull): ...


class KeyLimited(Overloaded):
    """`kind`: requests or tokens. `limit` is in words, for the client."""


class PeerLost(MeshError):
    """The other process has ended or is silent. Retry elsewhere, if no token has been sent."""


class NobodyListens(PeerLost):
    """NATS has no subscriber for the subject."""


class ListenerGone(NobodyListens):
    """Only repetitions of a call found no subscriber: a process may have received the call, and lost NATS since."""


class PrefillLost(PeerLost): ...


class DecodeLost(PeerLost): ...


class FramesLost(DecodeLost):
    """Tokens were lost, although their decode instance is healthy."""


class TransferFailed(PeerLost):
    """KV did not arrive completely, so none of it may be used."""


class KvCorrupt(TransferFailed): ...


class StaleInstance(PeerLost): ...


class KvUnavailable(MeshError):
    """KV did not arrive, and `on_transfer_failure` is "fail". `cause` names the error's class.

    It is not a PeerLost, because frontends retry those.
    """


class BackendUnavailable(MeshError):
    """etcd, NATS or a KV transfer backend is unusable."""


class DeadlineExceeded(MeshError):
    """Retry elsewhere, unless it was the request's own deadline."""


class Cancelled(MeshError):
    """The client has disconnected, or decode assumed so. Only a frontend that still has the client retries."""


class InvariantBroken(MeshError):
    """A bug in this process: do not retry."""


class IllegalTransition(InvariantBroken): ...


class PageLeak(InvariantBroken):
    """Free, cached and held pages do not add up to the pool."""


class PeerBroken(InvariantBroken):
    """Another process reported InvariantBroken, perhaps because of the request.

    The circuit breaker counts it. The request is sent to at most one other instance.
    """


class NonFiniteLogits(PeerBroken): ...


def _subclasses(cls: type[MeshError]) -> list[type[MeshError]]:
    return [cls, *(deep for child in cls.__subclasses__() for deep in _subclasses(child))]


BY_NAME: dict[str, type[MeshError]] = {cls.__name__: cls for cls in _subclasses(MeshError)}


def reported(name: str, unknown: type[MeshError] = PeerBroken) -> type[MeshError]:
    """The error class that another process named; `unknown` if this process has none.

    InvariantBroken becomes PeerBroken, because the bug is in the other process.
    """
    cls = BY_NAME.get(name, unknown)
    if issubclass(cls, PeerBroken):
        return cls
    return PeerBroken if issubclass(cls, InvariantBroken) else cls
