"""frontend ↔ decode: requests on `<decode subject>.generate`, frames of tokens on `reply_to`.

Other subjects: `.cancel` for streams, `.resend` for lost frames. Each branch is a stream.
"""

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal, NamedTuple

import msgpack
import msgspec

from components.errors import MalformedMessage, MeshError
from components.wire.codec import Dated, Struct, Subject, message, unpack_plain
from components.wire.logprobs import PackedLogprobs, TokenLogprobs, pack_logprobs, unpack_logprobs
from components.wire.refused import Refused, refusal
from components.wire.sampling import SamplingParams
from components.wire.step_stats import DraftCounts
from components.wire.tokens import pack_tokens, unpack_tokens

FRAME_VERSION: Final = 5
MIN_FIELDS: Final = 9  # per item; receivers that ask for more get up to MAX_FIELDS
MAX_FIELDS: Final = 11
MAX_STREAM_ID: Final = 2**63 - 1
PLAIN: Final = (None, None, 0, 0, None, None, None, None)  # an item's fields after its tokens


@message("generate.v5")  # new with each FRAME_VERSION
class GenerateRequest(Dated):
    sent_by = "frontend"

    request_id: str
    epoch: str
    model: str
    stream_id: int  # of the first branch; the others' follow
    reply_to: Subject
    token_ids: bytes  # int32[T], after a move with the tokens so far
    sampling: SamplingParams
    num_generated: int = 0  # of `token_ids`, after a move
    cache_salt: str = ""
    priority: int = 0  # lower is served first
    adapter: str = ""
    session: str = ""
    wants_origin: bool = False  # send `origin`, which an older frontend would refuse
    prediction: bytes = b""  # int32[P], which the answer may repeat; with it the draft counts are sent


@message("generate-accepted.v1")
class GenerateAccepted(Struct):
    request_id: str
    number: int = 0  # a heartbeat whose `accepted` is at least this covers the request; 0: unknown


@message("cancel.v1")
class CancelStreams(Struct):
    reply_to: Subject
    stream_ids: list[int]


@message("cancelled.v1")
class StreamsCancelled(Struct):
    count: int


@message("resend.v1")
class ResendFrames(Struct):
    reply_to: Subject
    first: int  # frame number


@message("resent.v1")
class FramesResent(Struct):
    oldest: int  # the oldest frame that decode has
    next: int  # after the last resent frame
    made: int  # after the last frame of all


class PromptOrigin(NamedTuple):
    prefill: str = ""  # id of the chosen instance; its transfer may have failed
    why_local: str = ""  # if decode computed the prompt


class StreamItem(NamedTuple):
    stream_id: int
    seq: int  # of its first token; a gap means a lost frame
    token_ids: list[int]
    finish: str | None = None  # "stop" or "length", with the last tokens
    error: Refused | None = None
    num_cached_tokens: int = 0
    sent_unix_ns: int = 0
    logprobs: list[TokenLogprobs] | None = None
    # with branch 0's first token: from the prompt's second token on
    prompt_logprobs: Sequence[TokenLogprobs] | None = None
    origin: PromptOrigin | None = None  # with the first token
    draft_counts: DraftCounts | None = None  # if the request has a prediction, and drafts were checked


def num_seqs(token_ids: Sequence[int]) -> int:
    """An item takes a sequence number for each token, but at least one."""
    return len(token_ids) or 1


class OtherFrameVersion(MalformedMessage):
    """The instance id has the same position in all versions."""

    def __init__(self, version: int, instance_id: str) -> None:
        super().__init__(
            f"token frames of version {version} from decode {instance_id}, this process reads {FRAME_VERSION}"
        )
        self.instance_id = instance_id


@dataclass(slots=True)
class TokenFrame:
    """Items of one frontend's streams. Plain ones are in columns, because a tuple each would dominate the cost."""

    instance_id: str = ""  # this and the next three are set when it is sent
    epoch: str = ""
    step: int = 0
    number: int = 0  # per frontend, from 0
    streams: "array[int]" = field(default_factory=partial(array, "q"))
    seqs: "array[int]" = field(default_factory=partial(array, "q"))
    token_ids: list[list[int]] = field(default_factory=list)
    others: list[tuple[int, StreamItem]] = field(default_factory=list)  # with the number of plain items before each

    def __len__(self) -> int:
        return len(self.seqs) + len(self.others)

    @property
    def items(self) -> list[StreamItem]:
        plain = list(map(StreamItem, self.streams, self.seqs, self.token_ids))
        items: list[StreamItem] = []
        taken = 0
        for at, item in self.others:
            items += plain[taken:at]
            items.append(item)
            taken = at
        return items + plain[taken:] if items else plain

    def add_tokens(self, stream_id: int, seq: int, token_ids: list[int]) -> None:
        self.streams.append(stream_id)
        self.seqs.append(seq)
        self.token_ids.append(token_ids)

    def add(self, item: StreamItem) -> None:
        if item.token_ids and item[3:] == PLAIN:
            self.add_tokens(item.stream_id, item.seq, item.token_ids)
        else:
            self.others.append((len(self.seqs), item))

    def failed(self, error: MeshError) -> "TokenFrame":
        """A frame that ends these streams with `error`."""
        failed, refused = TokenFrame(), refusal(error)
        firsts: dict[int, int] = {}
        for stream_id, seq in [*zip(self.streams, self.seqs, strict=True), *(item[:2] for _, item in self.others)]:
            firsts[stream_id] = min(seq, firsts.get(stream_id, seq))
        for stream_id, seq in firsts.items():
            failed.add(StreamItem(stream_id, seq, [], None, refused))
        return failed

    def pack(self) -> bytes:
        lengths, tokens = array("i", map(len, self.token_ids)), array("i")
        for token_ids in self.token_ids:
            tokens.extend(token_ids)
        columns = [_little_endian(column) for column in (self.streams, self.seqs, lengths, tokens)]
        others = [(at, _other(item)) for at, item in self.others]
        head = (FRAME_VERSION, self.instance_id, self.epoch, self.step, self.number)
        packed: bytes = msgpack.packb((*head, *columns, others))
        return packed


def _other(item: StreamItem) -> tuple[Any, ...]:
    error = None if item.error is None else (item.error.error, item.error.message, item.error.fields)
    prompt, origin, counts = item.prompt_logprobs, item.origin, item.draft_counts
    fields = (
        item.stream_id,
        item.seq,
        pack_tokens(item.token_ids),
        item.finish,
        error,
        item.num_cached_tokens,
        item.sent_unix_ns,
        None if item.logprobs is None else pack_logprobs(item.logprobs),
        None if prompt is None else (len(prompt), pack_logprobs(prompt)),
    )
    if counts is not None:
        return (*fields, origin, counts)
    return fields if origin is None else (*fields, origin)


def _little_endian(column: "array[int]") -> bytes:
    if sys.byteorder == "big":
        column = column[:]
        column.byteswap()
    return column.tobytes()


def unpack_frame(data: bytes) -> TokenFrame:
    """Raises: OtherFrameVersion, or MalformedMessage."""
    value = unpack_plain(data)
    is_frame = isinstance(value, list) and len(value) > 1 and type(value[0]) is int and isinstance(value[1], str)
    if is_frame and value[0] != FRAME_VERSION:
        raise OtherFrameVersion(value[0], value[1])
    if not (is_frame and len(value) == 10):
        raise MalformedMessage(f"not a token frame of version {FRAME_VERSION}")
    _, instance_id, epoch, step, number, streams, seqs, lengths, tokens, others = value
    named = isinstance(instance_id, str) and isinstance(epoch, str)
    if not (named and isinstance(step, int) and isinstance(number, int) and number >= 0):
        raise MalformedMessage("token frame: bad header")
    frame = TokenFrame(instance_id, epoch, step, number, _column("q", streams), _column("q", seqs))
    counts, all_tokens, taken = _column("i", lengths), _column("i", tokens).tolist(), 0
    if not len(frame.streams) == len(frame.seqs) == len(counts):
        raise MalformedMessage("token frame: columns of different lengths")
    for length in counts:
        frame.token_ids.append(all_tokens[taken : taken + length])
        taken += length
        if length < 1:
            raise MalformedMessage("token frame: an item in columns without tokens")
    if taken != len(all_tokens):
        raise MalformedMessage(f"token frame: {len(all_tokens)} tokens where {taken} belong")
    frame.others = _others(others, len(counts))
    return frame


def _column(kind: Literal["q", "i"], data: Any) -> "array[int]":
    column = array(kind)
    if not isinstance(data, bytes) or len(data) % column.itemsize:
        raise MalformedMessage("token frame: bad column")
    column.frombytes(data)
    if sys.byteorder == "big":
        column.byteswap()
    return column


def _others(others: Any, num_plain: int) -> list[tuple[int, StreamItem]]:
    if not isinstance(others, list):
        raise MalformedMessage("token frame: items must be an array")
    found: list[tuple[int, StreamItem]] = []
    last = 0
    for other in others:
        if not (isinstance(other, list) and len(other) == 2 and isinstance(other[0], int)):
            raise MalformedMessage("token frame: bad item")
        if not last <= other[0] <= num_plain:
            raise MalformedMessage("token frame: items out of order")
        last = other[0]
        found.append((last, _item(other[1])))
    return found


def _item(value: Any) -> StreamItem:
    if not (isinstance(value, list) and MIN_FIELDS <= len(value) <= MAX_FIELDS):
        raise MalformedMessage(f"token frame: an item is an array of {MIN_FIELDS} to {MAX_FIELDS}")
    stream_id, seq, tokens, finish, error, cached, sent, packed, prompt, *more = value
    counts = _draft_counts(more[1]) if len(more) == 2 else None
    origin = None if not more or (counts is not None and more[0] is None) else _origin(more[0])
    numbers = isinstance(stream_id, int) and isinstance(seq, int) and isinstance(cached, int) and isinstance(sent, int)
    if not (numbers and isinstance(tokens, bytes) and (finish is None or isinstance(finish, str))):
        raise MalformedMessage("token frame: bad item")
    if packed is not None and not isinstance(packed, bytes):
        raise MalformedMessage("token frame: bad log-probabilities")
    token_ids = unpack_tokens(tokens)
    logprobs = None if packed is None else unpack_logprobs(packed, len(token_ids))
    return StreamItem(
        stream_id,
        seq,
        token_ids,
        finish,
        _error(error),
        cached,
        sent,
        logprobs,
        _prompt_logprobs(prompt),
        origin,
        counts,
    )


def _draft_counts(value: Any) -> DraftCounts:
    if not (isinstance(value, list) and len(value) == 2 and all(type(count) is int and count >= 0 for count in value)):
        raise MalformedMessage("token frame: bad counts of drafts")
    return DraftCounts(*value)


def _origin(value: Any) -> PromptOrigin:
    if not (isinstance(value, list) and len(value) == 2 and all(isinstance(text, str) for text in value)):
        raise MalformedMessage("token frame: bad origin of a prompt")
    return PromptOrigin(*value)


def _prompt_logprobs(value: Any) -> Sequence[TokenLogprobs] | None:
    if value is None:
        return None
    if not (isinstance(value, list) and len(value) == 2):
        raise MalformedMessage("token frame: bad log-probabilities of the prompt")
    count, data = value
    if not (isinstance(count, int) and count >= 0 and isinstance(data, bytes)):
        raise MalformedMessage("token frame: bad log-probabilities of the prompt")
    return PackedLogprobs(data, count)


def _error(value: Any) -> Refused | None:
    if value is None:
        return None
    if not (isinstance(value, list) and len(value) == 3 and isinstance(value[2], dict)):
        raise MalformedMessage("token frame: bad error")
    try:
        return msgspec.convert(dict(zip(("error", "message", "fields"), value, strict=True)), Refused)
    except msgspec.ValidationError as exc:
        raise MalformedMessage("token frame: bad error") from exc
