"""Log-probabilities on the wire, as arrays."""

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

from components.errors import MalformedMessage


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token's log-probability and alternatives, natural logarithms, as in OpenAI's API.

    The log-softmax of the model's own logits, before penalties, bias, mask, temperature and cuts.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob) of the most probable tokens, in order


def packed_bytes(num_tokens: int, alternatives: int) -> int:
    return 4 + num_tokens * (4 + 8 * alternatives)


def pack_logprobs(told: Sequence[TokenLogprobs]) -> bytes:
    """int32 K, float32[T] of the tokens, int32[T, K] ids and float32[T, K] of their K alternatives; little-
    endian.
    """
    count = len(told[0].top) if told else 0
    ids = array("i", [token_id for token in told for token_id, _ in token.top])
    if len(ids) != len(told) * count:
        raise ValueError("tokens of one request have equally many alternatives")
    values = array("f", [logprob for token in told for _, logprob in token.top])
    chosen = array("f", [token.logprob for token in told])
    return b"".join([_bytes(array("i", [count])), _bytes(chosen), _bytes(ids), _bytes(values)])


class PackedLogprobs(Sequence[TokenLogprobs]):
    """Log-probabilities converted one by one: a long prompt has half a million."""

    __slots__ = ("_chosen", "_count", "_ids", "_values")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, data: bytes, num_tokens: int) -> None:
        """`data` is from `pack_logprobs`. Raises: MalformedMessage, for another number of tokens."""
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
    """Raises: MalformedMessage, for another number of tokens."""
    count, chosen, ids, values = _columns(data, num_tokens)
    if not count:
        return [TokenLogprobs(logprob) for logprob in chosen]
    tops = tuple(zip(ids, values, strict=True))
    return [TokenLogprobs(logprob, tops[i * count : (i + 1) * count]) for i, logprob in enumerate(chosen)]


def _columns(data: bytes, num_tokens: int) -> "tuple[int, array[float], array[int], array[float]]":
    """The number of alternatives, and the arrays of `pack_logprobs`."""
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
