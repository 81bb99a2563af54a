"""Log-probabilities, packed as arrays."""

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

from components.errors import MalformedMessage


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of the unmodified logits' softmax."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most probable first


def packed_bytes(num_tokens: int, alternatives: int) -> int:
    return 4 + num_tokens * (4 + 8 * alternatives)


def pack_logprobs(logprobs: Sequence[TokenLogprobs]) -> bytes:
    """Little-endian: int32 K, float32[T] and, for K alternatives, int32[T, K] ids and float32[T, K]."""
    count = len(logprobs[0].top) if logprobs else 0
    ids = array("i", [token_id for token in logprobs for token_id, _ in token.top])
    if len(ids) != len(logprobs) * count:
        raise ValueError("tokens of one request have equally many alternatives")
    values = array("f", [logprob for token in logprobs for _, logprob in token.top])
    chosen = array("f", [token.logprob for token in logprobs])
    return b"".join([_bytes(array("i", [count])), _bytes(chosen), _bytes(ids), _bytes(values)])


class PackedLogprobs(Sequence[TokenLogprobs]):
    """Converted on demand: a long prompt has half a million."""

    __slots__ = ("_chosen", "_count", "_ids", "_values")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, data: bytes, num_tokens: int) -> None:
        self._count, self._chosen, self._ids, self._values = _columns(data, num_tokens)

    def __len__(self) -> int:
        return len(self._chosen)

    @overload
    def __getitem__(self, at: int) -> TokenLogprobs: ...
    @overload
    def __getitem__(self, at: slice) -> list[TokenLogprobs]: ...
    def __getitem__(self, at: int | slice) -> TokenLogprobs | list[TokenLogprobs]:
        if isinstance(at, slice):
            return [self[i] for i in range(len(self))[at]]
        start = range(len(self))[at] * self._count
        end = start + self._count
        return TokenLogprobs(self._chosen[at], tuple(zip(self._ids[start:end], self._values[start:end], strict=True)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)


def unpack_logprobs(data: bytes, num_tokens: int) -> list[TokenLogprobs]:
    count, chosen, ids, values = _columns(data, num_tokens)
    if not count:
        return [TokenLogprobs(logprob) for logprob in chosen]
    tops = tuple(zip(ids, values, strict=True))
    return [TokenLogprobs(logprob, tops[i * count : (i + 1) * count]) for i, logprob in enumerate(chosen)]


def _columns(data: bytes, num_tokens: int) -> "tuple[int, array[float], array[int], array[float]]":
    count = int.from_bytes(data[:4], "little", signed=True)
    if count < 0 or len(data) != packed_bytes(num_tokens, count):
        raise MalformedMessage(f"{len(data)} bytes are not log-probabilities of {num_tokens} tokens")
    ids_at, values_at = 4 + 4 * num_tokens, 4 + 4 * num_tokens * (1 + count)
    return count, _array("f", data[4:ids_at]), _array("i", data[ids_at:values_at]), _array("f", data[values_at:])


def _bytes(values: "array[Any]") -> bytes:
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def _array(kind: str, data: bytes) -> "array[Any]":
    values: array[Any] = array(kind, data)
    if sys.byteorder == "big":
        values.byteswap()
    return values
