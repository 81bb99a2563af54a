"""Triton kernels for attention over the pool, [num_pages, kv_heads, layers, 2, page_size, head_dim].

Tables are int32. `pages` holds all block tables; request r's starts at `table_starts[r]`.
Numbers that change between steps are not specialised on, so a model compiles each kernel once.
Scores are in base 2. Zeros pad head dimensions to powers of two.
OPERANDS is float32 under the interpreter, whose numpy has no bfloat16, else the pool's type.

Source: FlashAttention-2, Dao 2023, arXiv:2307.08691; split contexts, Dao et al. 2023, "Flash-Decoding for long-context
inference"; pages, Kwon et al. 2023, arXiv:2309.06180.
"""

import torch
import triton
import triton.language as tl

OPERANDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _addresses(
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
def _score(products, scaling, softcap, CAPPED: tl.constexpr):
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
def _take_block(
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
    scores = _score(tl.dot(query, keys.to(OPERANDS), input_precision=PRECISION), scaling, softcap, CAPPED)
    if MASKED:
        scores = tl.where(seen, scores, -float("inf"))
    above = tl.maximum(highest, tl.max(scores, 1))
    # a row that has seen no key stays at -inf; -inf minus -inf is NaN
    base = tl.where(above == -float("inf"), 0.0, above) if MASKED else above
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(highest - base)
    values = tl.load(starts[:, None] + (PAGE * HEAD_DIM) + dims[None, :], mask=of_values, other=0.0)
    weighed = tl.dot(weights.to(values.dtype).to(OPERANDS), values.to(OPERANDS), input_precision=PRECISION)
    return acc * shrink[:, None] + weighed, above, total * shrink + tl.sum(weights, 1)


@triton.jit
def _take_sink(acc, highest, total, sink):
    """Add a key without a value to the running softmax."""
    score = sink.to(tl.float32) * LOG2_E
    above = tl.maximum(highest, score)
    shrink = tl.exp2(highest - above)
    return acc * shrink[:, None], above, total * shrink + tl.exp2(score - above)


@triton.jit(do_not_specialize=["layer", "window"])
def decode_kernel(
    out,  # [rows, heads, head_dim], unless SPLIT
    partial_out,  # float32 [rows, heads, splits, head_dim], if SPLIT
    partial_log,  # float32 [rows, heads, splits]: log2 of each sum of weights, -inf for none
    query,
    key,
    value,
    pool,
    sinks,  # [heads], if SINKS
    context_lens,
    table_starts,
    pages,
    layer,
    scaling,
    softcap,
    window,
    query_head_stride,
    query_token_stride,
    key_head_stride,
    key_token_stride,
    value_head_stride,
    value_token_stride,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    LAYERS: tl.constexpr,
    PAGE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
    OPERANDS: tl.constexpr,
):
    """Attend with one token to a split of its context, for one key head: grid (rows, kv_heads, splits).

    Split 0 writes the new KV and reads it from `key` and `value`, so no program reads a slot that is being written.
    A row with context 0 is padding: its output is zero.
    """
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    context = tl.load(context_lens + row)
    table = tl.load(table_starts + row)
    last = context - 1
    dims = tl.arange(0, BLOCK_D)
    wide = dims < HEAD_DIM
    members = tl.arange(0, BLOCK_H)
    heads = head * GROUP + members
    mine = (members < GROUP)[:, None] & wide[None, :]
    q = tl.load(
        query + row * query_token_stride + heads[:, None] * query_head_stride + dims[None, :], mask=mine, other=0.0
    )
    operand = q.to(OPERANDS)
    acc = tl.zeros([BLOCK_H, BLOCK_D], dtype=tl.float32)
    highest = tl.full([BLOCK_H], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_H], dtype=tl.float32)
    if split == 0 and context > 0:
        new_key = tl.load(key + row * key_token_stride + head * key_head_stride + dims, mask=wide, other=0.0)
        new_value = tl.load(value + row * value_token_stride + head * value_head_stride + dims, mask=wide, other=0.0)
        slot = _addresses(pool, pages, table, last, context > 0, head, layer, KV_HEADS, LAYERS, PAGE, HEAD_DIM)
        tl.store(slot + dims, new_key, mask=wide)
        tl.store(slot + (PAGE * HEAD_DIM) + dims, new_value, mask=wide)
        products = tl.sum(q.to(tl.float32) * new_key.to(tl.float32)[None, :], 1)
        highest = _score(products, scaling, softcap, CAPPED)
        total = tl.full([BLOCK_H], 1.0, dtype=tl.float32)
        acc += new_value.to(tl.float32)[None, :]
        if SINKS:
            sink = tl.load(sinks + heads, mask=members < GROUP, other=0.0)
            acc, highest, total = _take_sink(acc, highest, total, sink)
    first = 0
    if WINDOWED:
        first = tl.maximum(0, context - window)
    # each split gets the same number of blocks of keys first..last-1
    length = tl.cdiv(tl.cdiv(last - first, BLOCK_N), tl.num_programs(2)) * BLOCK_N
    begin = first + split * length
    end = tl.minimum(begin + length, last)
    for n in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        positions = n + tl.arange(0, BLOCK_N)
        inside = positions < end
        starts = _addresses(pool, pages, table, positions, inside, head, layer, KV_HEADS, LAYERS, PAGE, HEAD_DIM)
        seen = inside[None, :]
        acc, highest, total = _take_block(
            acc, highest, total, operand, starts, seen, inside, scaling, softcap,
            PAGE, HEAD_DIM, BLOCK_D, CAPPED, True, PRECISION, OPERANDS,
        )  # fmt: skip
    filled = tl.where(total > 0, total, 1.0)
    result = acc / filled[:, None]
    rows = row.to(tl.int64) * (KV_HEADS * GROUP) + heads
    if SPLIT:
        splits = tl.num_programs(2)
        tl.store(partial_out + ((rows * splits + split) * HEAD_DIM)[:, None] + dims[None, :], result, mask=mine)
        log = tl.where(total > 0, highest + tl.log2(filled), -float("inf"))
        tl.store(partial_log + rows * splits + split, log, mask=members < GROUP)
    else:
        tl.store(out + (rows * HEAD_DIM)[:, None] + dims[None, :], result.to(out.dtype.element_ty), mask=mine)


@triton.jit
def join_kernel(
    out, partial_out, partial_log, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    """Combine the splits of a row and query head: grid (rows * heads,)."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    wide = dims < HEAD_DIM
    splits = tl.arange(0, SPLITS)
    logs = tl.load(partial_log + row * SPLITS + splits)
    highest = tl.max(logs, 0)
    weights = tl.exp2(logs - tl.where(highest == -float("inf"), 0.0, highest))
    total = tl.sum(weights, 0)
    parts = tl.load(
        partial_out + (row * SPLITS + splits)[:, None] * HEAD_DIM + dims[None, :],
        mask=(weights > 0)[:, None] & wide[None, :],
        other=0.0,
    )
    result = tl.sum(parts * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + row * HEAD_DIM + dims, result.to(out.dtype.element_ty), mask=wide)


@triton.jit(do_not_specialize=["layer", "num_decodes"])
def write_kernel(
    key,
    value,
    pool,
    context_lens,
    table_starts,
    query_starts,
    pages,
    block_requests,
    block_firsts,
    layer,
    num_decodes,
    key_head_stride,
    key_token_stride,
    value_head_stride,
    value_token_stride,
    KV_HEADS: tl.constexpr,
    LAYERS: tl.constexpr,
    PAGE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Write a block of a chunk's KV: grid (kv_heads, blocks)."""
    head, block = tl.program_id(0), tl.program_id(1)
    request = tl.load(block_requests + block)
    rows = tl.load(block_firsts + block) + tl.arange(0, BLOCK_M)
    first_token = tl.load(query_starts + request)
    length = tl.load(query_starts + request + 1) - first_token
    context = tl.load(context_lens + num_decodes + request)
    table = tl.load(table_starts + num_decodes + request)
    inside = rows < length
    slots = _addresses(
        pool, pages, table, context - length + rows, inside, head, layer, KV_HEADS, LAYERS, PAGE, HEAD_DIM
    )
    dims = tl.arange(0, BLOCK_D)
    mask = inside[:, None] & (dims < HEAD_DIM)[None, :]
    tokens = (first_token + rows).to(tl.int64)
    keys = tl.load(key + tokens[:, None] * key_token_stride + head * key_head_stride + dims[None, :], mask=mask)
    tl.store(slots[:, None] + dims[None, :], keys, mask=mask)
    values = tl.load(value + tokens[:, None] * value_token_stride + head * value_head_stride + dims[None, :], mask=mask)
    tl.store(slots[:, None] + (PAGE * HEAD_DIM) + dims[None, :], values, mask=mask)


@triton.jit(do_not_specialize=["layer", "num_decodes", "window"])
def prompt_kernel(
    out,
    query,
    sinks,  # [heads], if SINKS
    pool,
    context_lens,
    table_starts,
    query_starts,
    pages,
    block_requests,
    block_firsts,
    layer,
    num_decodes,
    scaling,
    softcap,
    window,
    query_head_stride,
    query_token_stride,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    LAYERS: tl.constexpr,
    PAGE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
    OPERANDS: tl.constexpr,
):
    """Attend with a block of a chunk's queries, after `write_kernel`: grid (heads, blocks).

    Heads vary fastest, so those that share a key head find its pages cached.
    """
    head, block = tl.program_id(0), tl.program_id(1)
    request = tl.load(block_requests + block)
    first_row = tl.load(block_firsts + block)
    first_token = tl.load(query_starts + request)
    length = tl.load(query_starts + request + 1) - first_token
    context = tl.load(context_lens + num_decodes + request)
    table = tl.load(table_starts + num_decodes + request)
    rows = first_row + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    mine = (rows < length)[:, None] & (dims < HEAD_DIM)[None, :]
    tokens = (first_token + rows).to(tl.int64)
    q = tl.load(
        query + tokens[:, None] * query_token_stride + head * query_head_stride + dims[None, :], mask=mine, other=0.0
    )
    operand = q.to(OPERANDS)
    positions = context - length + rows
    lowest = context - length + first_row
    end = tl.minimum(lowest + BLOCK_M, context)  # after the last key of any query
    begin = 0
    whole = (lowest + 1) // BLOCK_N * BLOCK_N  # before this, every query sees every key
    if WINDOWED:
        begin = tl.maximum(0, lowest - window + 1) // BLOCK_N * BLOCK_N
        whole = begin
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    highest = tl.full([BLOCK_M], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    if SINKS:  # the state after a key without a value
        highest = tl.zeros([BLOCK_M], dtype=tl.float32) + tl.load(sinks + head).to(tl.float32) * LOG2_E
        total += 1.0
    for n in tl.range(begin, whole, BLOCK_N, num_stages=STAGES):
        keys = n + tl.arange(0, BLOCK_N)
        inside = keys >= 0
        starts = _addresses(pool, pages, table, keys, inside, head // GROUP, layer, KV_HEADS, LAYERS, PAGE, HEAD_DIM)
        acc, highest, total = _take_block(
            acc, highest, total, operand, starts, inside, inside, scaling, softcap,
            PAGE, HEAD_DIM, BLOCK_D, CAPPED, False, PRECISION, OPERANDS,
        )  # fmt: skip
    for n in tl.range(whole, end, BLOCK_N, num_stages=STAGES):
        keys = n + tl.arange(0, BLOCK_N)
        inside = keys < end
        starts = _addresses(pool, pages, table, keys, inside, head // GROUP, layer, KV_HEADS, LAYERS, PAGE, HEAD_DIM)
        back = positions[:, None] - keys[None, :]
        seen = (back >= 0) & inside[None, :]
        if WINDOWED:
            seen = seen & (back < window)
        acc, highest, total = _take_block(
            acc, highest, total, operand, starts, seen, inside, scaling, softcap,
            PAGE, HEAD_DIM, BLOCK_D, CAPPED, True, PRECISION, OPERANDS,
        )  # fmt: skip
    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    where = out + (tokens * (KV_HEADS * GROUP) + head)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(where, result.to(out.dtype.element_ty), mask=mine)
