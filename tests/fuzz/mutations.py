"""Slightly damaged bytes and values, for fuzzing."""

from typing import Any

from hypothesis import strategies as st

INTERESTING: list[Any] = [
    None, True, False, 0, 1, -1, 2**31 - 1, 2**31, 2**63 - 1, -(2**63), 2**64 - 1, 0.0, -0.0, 0.5, 1e308, "", "a", "\0",
    "\u2028", "é😀", "a" * 600, [], [[]], {}, {"": None}, {"type": "text", "text": "a"}, [None], [0] * 200,
]  # fmt: skip
SCALARS: st.SearchStrategy[Any] = (
    st.sampled_from(INTERESTING)
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
)
JSON: st.SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
WIRE: st.SearchStrategy[Any] = st.recursive(
    SCALARS | st.binary(max_size=24) | st.floats(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """Change, remove, repeat or insert some bytes of `data`."""
    out = bytearray(data)
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, len(out)))
        end = draw(st.integers(at, min(len(out), at + 16)))
        match draw(st.integers(0, 3)):
            case 0:
                out[at:end] = draw(st.binary(min_size=end - at, max_size=end - at))
            case 1:
                del out[at:end]
            case 2:
                out[at:at] = out[at:end]
            case _:
                out[at:at] = draw(st.binary(max_size=8))
    return bytes(out)


@st.composite
def twisted(draw: st.DrawFn, value: Any, others: st.SearchStrategy[Any], twists: int = 3) -> Any:
    """Replace, remove or add some parts of `value`, at any depth."""
    for _ in range(draw(st.integers(1, twists))):
        value = draw(_twisted_once(value, others))
    return value


@st.composite
def _twisted_once(draw: st.DrawFn, value: Any, others: st.SearchStrategy[Any]) -> Any:
    if isinstance(value, dict) and value and draw(st.integers(0, 3)):
        key = draw(st.sampled_from(sorted(value)))
        match draw(st.integers(0, 4)):
            case 0:
                return {name: inner for name, inner in value.items() if name != key}
            case 1:
                return {**value, draw(st.text(max_size=8)): draw(others)}
            case _:
                return {**value, key: draw(_twisted_once(value[key], others))}
    if isinstance(value, list) and value and draw(st.integers(0, 3)):
        at = draw(st.integers(0, len(value) - 1))
        if not draw(st.integers(0, 4)):
            return value[:at] + value[at + 1 :]
        return [*value[:at], draw(_twisted_once(value[at], others)), *value[at + 1 :]]
    return draw(others)
