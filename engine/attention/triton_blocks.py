"""Parts of the Triton kernels for attention: the places of keys, a block of keys, and the results.

Scores are in base 2. Zeros pad head dimensions to powers of two. OPERANDS is as in `triton_kernels`. The pool has the queries'
type, or holds 8-bit floats, which saturate.

Source: FlashAttention-2, Dao 2023, arXiv:2307.08691; pages, Kwon et al. 2023, arXiv:2309.06180.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
INTEGERS = tl.constexpr(1.5 * 2**23)  # a float32 of about this size is an integer


@triton.jit
def addresses(
    pool,
    pages,
    table,
    positions,
    inside,
    head,
    layer,
    KV_HEADS: tl.constexpr,
    LAYERS: tl.constexpr,
    PAGE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Addresses of keys; values follow PAGE * HEAD_DIM later."""
    page = tl.load(pages + table + positions // PAGE, mask=inside, other=0).to(tl.int64)
    piece = (page * KV_HEADS + head) * LAYERS + layer
    return pool + piece * (2 * PAGE * HEAD_DIM) + (positions % PAGE) * HEAD_DIM


@triton.jit
def as_stored(numbers, pool):
    """Convert to the pool's type. 8-bit floats are rounded as on the CPU; Triton's interpreter truncates some."""
    if pool.dtype.element_ty != tl.float8e4nv:
        return numbers
    else:  # noqa: RET505 - Triton compiles what follows a return
        wide = numbers.to(tl.float32)
        magnitude = tl.minimum(tl.abs(wide), 448.0)
        bits = magnitude.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)  # 120: difference of the exponents' biases
        small = (magnitude * 512.0 + INTEGERS - INTEGERS).to(tl.int32)  # multiples of 2^-9
        sign = (wide.to(tl.int32, bitcast=True) >> 24) & 0x80
        finite = tl.where(magnitude < 0.015625, small, normal)
        stored = (tl.where(wide == wide, finite, 0x7F) | sign).to(tl.uint8)  # noqa: PLR0124 - is it NaN
        return stored.to(tl.float8e4nv, bitcast=True)


@triton.jit
def score(products, scaling, softcap, CAPPED: tl.constexpr):
    """Scale scores. Not every Triton has tanh."""
    if CAPPED:
        capped = products * (scaling / softcap)
        small = tl.exp(-2 * tl.abs(capped))
        tanh = (1 - small) / (1 + small)
        scores = softcap * tl.where(capped < 0, -tanh, tanh)
    else:
        scores = products * scaling
    return scores * LOG2_E


@triton.jit
def take_block(
    acc,
    highest,
    total,
    query,
    starts,
    seen,
    inside,
    scaling,
    softcap,
    PAGE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    OPERANDS: tl.constexpr,
):
    """Add a block to the running softmax, masked by `seen` [rows, keys] if MASKED."""
    dims = tl.arange(0, BLOCK_D)
    wide = dims < HEAD_DIM
    if MASKED:
        of_keys, of_values = wide[:, None] & inside[None, :], inside[:, None] & wide[None, :]
    else:
        of_keys, of_values = wide[:, None], wide[None, :]
    keys = tl.load(starts[None, :] + dims[:, None], mask=of_keys, other=0.0)
    scores = score(tl.dot(query, keys.to(OPERANDS), input_precision=PRECISION), scaling, softcap, CAPPED)
    if MASKED:
        scores = tl.where(seen, scores, -float("inf"))
    above = tl.maximum(highest, tl.max(scores, 1))
    # a row that has seen no key stays at -inf; -inf minus -inf is NaN
    base = tl.where(above == -float("inf"), 0.0, above) if MASKED else above
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(highest - base)
    values = tl.load(starts[:, None] + (PAGE * HEAD_DIM) + dims[None, :], mask=of_values, other=0.0)
    rounded = weights
    if values.dtype != tl.float8e4nv:  # weights have the type of queries
        rounded = weights.to(values.dtype)
    weighed = tl.dot(rounded.to(OPERANDS), values.to(OPERANDS), input_precision=PRECISION)
    return acc * shrink[:, None] + weighed, above, total * shrink + tl.sum(weights, 1)


@triton.jit
def take_sink(acc, highest, total, sink):
    """Add a key without a value to the running softmax."""
    own = sink.to(tl.float32) * LOG2_E
    above = tl.maximum(highest, own)
    shrink = tl.exp2(highest - above)
    return acc * shrink[:, None], above, total * shrink + tl.exp2(own - above)


@triton.jit
def store_result(
    out,
    partial_out,
    partial_log,
    places,
    parts,
    mine,
    alone,
    acc,
    highest,
    total,
    sink,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Store at rows `places` of `out` if the span is `alone`, else at rows `parts` of the partial results."""
    dims = tl.arange(0, BLOCK_D)[None, :]
    mask = mine[:, None] & (dims < HEAD_DIM)
    if alone:
        if SINKS:
            acc, highest, total = take_sink(acc, highest, total, sink)
        result = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out + places[:, None] * HEAD_DIM + dims, result.to(out.dtype.element_ty), mask=mask)
    else:
        filled = tl.where(total > 0, total, 1.0)
        tl.store(partial_out + parts[:, None] * HEAD_DIM + dims, acc / filled[:, None], mask=mask)
        tl.store(partial_log + parts, tl.where(total > 0, highest + tl.log2(filled), -float("inf")), mask=mine)
