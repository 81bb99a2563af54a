"""Triton kernels for attention over the pool, [num_pages, kv_heads, layers, 2, page_size, head_dim].

Tables are int32. `pages` holds all block tables; request r's starts at `table_starts[r]`. A span's partial result, its sum
of values over its sum of weights, goes to a slot, and `join_kernel` combines those of a row in order.
Numbers that change between steps are not specialised on, so a model compiles each kernel once.
OPERANDS is float32 under the interpreter, whose numpy has no bfloat16, else the queries' type.

Source: split contexts, Dao et al. 2023, "Flash-Decoding for long-context inference".
"""

import torch
import triton
import triton.language as tl

from engine.attention.triton_blocks import addresses, as_stored, score, store_result, take_block, take_sink

OPERANDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit(do_not_specialize=["layer", "window"])
def decode_kernel(
    out,  # [rows, heads, head_dim]
    partial_out,  # float32 [slots, kv_heads, GROUP, head_dim]
    partial_log,  # float32 [slots, kv_heads, GROUP]: log2 of each sum of weights, -inf for none
    query,
    key,
    value,
    pool,
    sinks,  # [heads], if SINKS
    header,
    context_lens,
    table_starts,
    slots,
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
    SPAN: tl.constexpr,
    STAGES: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
    OPERANDS: tl.constexpr,
):
    """Attend with single tokens to spans of their contexts: grid (kv_heads, lanes).

    Lane i takes the pieces i, i + lanes, … of the list behind `pages`: [rows | spans]. So a graph's grid does not grow
    with its longest context. A context's last span writes the new KV and reads it from `key` and `value`, so no program
    reads a slot that is being written.
    """
    head, lane = tl.program_id(0), tl.program_id(1)
    pieces = tl.load(header)
    work = pages + tl.load(header + 1)
    dims = tl.arange(0, BLOCK_D)
    wide = dims < HEAD_DIM
    members = tl.arange(0, BLOCK_H)
    mine = members < GROUP
    heads = head * GROUP + members
    sink = tl.zeros([BLOCK_H], dtype=tl.float32)
    if SINKS:
        sink = tl.load(sinks + heads, mask=mine, other=0.0).to(tl.float32)
    for piece in tl.range(lane, pieces, tl.num_programs(1)):
        row = tl.load(work + piece)
        span = tl.load(work + pieces + piece)
        context = tl.load(context_lens + row)
        table = tl.load(table_starts + row)
        at = query + row * query_token_stride + heads[:, None] * query_head_stride + dims[None, :]
        q = tl.load(at, mask=mine[:, None] & wide[None, :], other=0.0)
        operand = q.to(OPERANDS)
        acc = tl.zeros([BLOCK_H, BLOCK_D], dtype=tl.float32)
        highest = tl.full([BLOCK_H], -float("inf"), dtype=tl.float32)
        total = tl.zeros([BLOCK_H], dtype=tl.float32)
        end = (span + 1) * SPAN
        if end >= context:
            end = context - 1
            acc, highest, total = _take_new(
                acc, total, q, row, end, table, head, layer, pool, pages, key, value, scaling, softcap,
                key_head_stride, key_token_stride, value_head_stride, value_token_stride,
                KV_HEADS, LAYERS, PAGE, HEAD_DIM, BLOCK_D, CAPPED,
            )  # fmt: skip
        begin = span * SPAN
        if WINDOWED:
            begin = tl.maximum(begin, context - window)
        for n in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
            positions = n + tl.arange(0, BLOCK_N)
            inside = positions < end
            starts = addresses(pool, pages, table, positions, inside, head, layer, KV_HEADS, LAYERS, PAGE, HEAD_DIM)
            acc, highest, total = take_block(
                acc, highest, total, operand, starts, inside[None, :], inside, scaling, softcap,
                PAGE, HEAD_DIM, BLOCK_D, CAPPED, True, PRECISION, OPERANDS,
            )  # fmt: skip
        slot = tl.load(slots + row) + span
        parts = (slot.to(tl.int64) * KV_HEADS + head) * GROUP + members
        places = row.to(tl.int64) * (KV_HEADS * GROUP) + heads
        store_result(
            out, partial_out, partial_log, places, parts, mine, context <= SPAN,
            acc, highest, total, sink, HEAD_DIM, BLOCK_D, SINKS,
        )  # fmt: skip


@triton.jit
def _take_new(
    acc,
    total,
    q,
    row,
    position,
    table,
    head,
    layer,
    pool,
    pages,
    key,
    value,
    scaling,
    softcap,
    key_head_stride,
    key_token_stride,
    value_head_stride,
    value_token_stride,
    KV_HEADS: tl.constexpr,
    LAYERS: tl.constexpr,
    PAGE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """Write a decode's new KV, and begin the running softmax with it."""
    dims = tl.arange(0, BLOCK_D)
    wide = dims < HEAD_DIM
    new_key = tl.load(key + row * key_token_stride + head * key_head_stride + dims, mask=wide, other=0.0)
    new_value = tl.load(value + row * value_token_stride + head * value_head_stride + dims, mask=wide, other=0.0)
    slot = addresses(pool, pages, table, position, position >= 0, head, layer, KV_HEADS, LAYERS, PAGE, HEAD_DIM)
    new_key, new_value = as_stored(new_key, pool), as_stored(new_value, pool)
    tl.store(slot + dims, new_key, mask=wide)
    tl.store(slot + (PAGE * HEAD_DIM) + dims, new_value, mask=wide)
    products = tl.sum(q.to(tl.float32) * new_key.to(tl.float32)[None, :], 1)
    return acc + new_value.to(tl.float32)[None, :], score(products, scaling, softcap, CAPPED), total + 1.0


@triton.jit
def join_kernel(
    out,
    partial_out,
    partial_log,
    sinks,
    context_lens,
    slots,
    counts,
    query_starts,
    block_requests,
    block_firsts,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
    ROWS: tl.constexpr,
    SPAN: tl.constexpr,
    DECODES: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Combine the spans of a query, BLOCK_S at a time: grid (kv_heads * ROWS, blocks).

    ROWS queries are a decode's row or a block of a chunk. A decode with one span has its result; one with none is
    padding, whose result is zero.
    """
    head, member, block = tl.program_id(0) // ROWS, tl.program_id(0) % ROWS, tl.program_id(1)
    if DECODES:
        spans = tl.cdiv(tl.load(context_lens + block), SPAN)
        token = block
        wanted = spans != 1
    else:
        spans = tl.load(counts + block)
        request = tl.load(block_requests + block)
        first_token = tl.load(query_starts + request)
        token = first_token + tl.load(block_firsts + block) + member // GROUP
        wanted = (token < tl.load(query_starts + request + 1)) & (member < ROWS // GROUP * GROUP)
    if wanted:
        dims = tl.arange(0, BLOCK_D)
        wide = dims < HEAD_DIM
        acc = tl.zeros([1, BLOCK_D], dtype=tl.float32)
        highest = tl.full([1], -float("inf"), dtype=tl.float32)
        total = tl.zeros([1], dtype=tl.float32)
        slot = tl.load(slots + block)
        for first in tl.range(0, spans, BLOCK_S):
            each = first + tl.arange(0, BLOCK_S)
            parts = ((slot + each).to(tl.int64) * KV_HEADS + head) * ROWS + member
            logs = tl.load(partial_log + parts, mask=each < spans, other=-float("inf"))
            above = tl.maximum(highest, tl.max(logs, 0))
            base = tl.where(above == -float("inf"), 0.0, above)
            weights = tl.exp2(logs - base)
            some = (weights > 0)[:, None] & wide[None, :]
            found = tl.load(partial_out + parts[:, None] * HEAD_DIM + dims[None, :], mask=some, other=0.0)
            shrink = tl.exp2(highest - base)
            acc = acc * shrink[:, None] + tl.sum(found * weights[:, None], 0)[None, :]
            total = total * shrink + tl.sum(weights, 0)
            highest = above
        query_head = head * GROUP + member % GROUP
        if SINKS:
            acc, highest, total = take_sink(acc, highest, total, tl.load(sinks + query_head))
        result = acc / tl.where(total > 0, total, 1.0)[:, None]
        place = (token.to(tl.int64) * (KV_HEADS * GROUP) + query_head) * HEAD_DIM
        tl.store(out + place + dims[None, :], result.to(out.dtype.element_ty), mask=wide[None, :])


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
    BLOCK_T: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Write the KV of a block's TOKENS: grid (kv_heads, blocks)."""
    head, block = tl.program_id(0), tl.program_id(1)
    request = tl.load(block_requests + block)
    offsets = tl.arange(0, BLOCK_T)
    rows = tl.load(block_firsts + block) + offsets
    first_token = tl.load(query_starts + request)
    length = tl.load(query_starts + request + 1) - first_token
    context = tl.load(context_lens + num_decodes + request)
    table = tl.load(table_starts + num_decodes + request)
    inside = (rows < length) & (offsets < TOKENS)
    slots = addresses(
        pool, pages, table, context - length + rows, inside, head, layer, KV_HEADS, LAYERS, PAGE, HEAD_DIM
    )
    dims = tl.arange(0, BLOCK_D)
    mask = inside[:, None] & (dims < HEAD_DIM)[None, :]
    tokens = (first_token + rows).to(tl.int64)
    keys = tl.load(key + tokens[:, None] * key_token_stride + head * key_head_stride + dims[None, :], mask=mask)
    tl.store(slots[:, None] + dims[None, :], as_stored(keys, pool), mask=mask)
    values = tl.load(value + tokens[:, None] * value_token_stride + head * value_head_stride + dims[None, :], mask=mask)
    tl.store(slots[:, None] + (PAGE * HEAD_DIM) + dims[None, :], as_stored(values, pool), mask=mask)


@triton.jit(do_not_specialize=["layer", "num_decodes", "window"])
def prompt_kernel(
    out,
    partial_out,  # float32 [slots, kv_heads, BLOCK_M, head_dim]
    partial_log,  # float32 [slots, kv_heads, BLOCK_M]
    query,
    sinks,  # [heads], if SINKS
    pool,
    context_lens,
    table_starts,
    query_starts,
    pages,
    block_requests,
    block_firsts,
    slots,
    counts,
    piece_blocks,
    piece_spans,
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
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPAN: tl.constexpr,
    STAGES: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
    OPERANDS: tl.constexpr,
):
    """Attend with a block of a chunk's queries to a span of keys, after `write_kernel`: grid (kv_heads, pieces).

    A block has TOKENS = BLOCK_M // GROUP tokens, each with all query heads of its key head.
    """
    head, piece = tl.program_id(0), tl.program_id(1)
    block = tl.load(piece_blocks + piece)
    span = tl.load(piece_spans + piece)
    request = tl.load(block_requests + block)
    first_row = tl.load(block_firsts + block)
    first_token = tl.load(query_starts + request)
    length = tl.load(query_starts + request + 1) - first_token
    context = tl.load(context_lens + num_decodes + request)
    table = tl.load(table_starts + num_decodes + request)
    members = tl.arange(0, BLOCK_M)
    rows = first_row + members // GROUP
    heads = head * GROUP + members % GROUP
    mine = (rows < length) & (members < TOKENS * GROUP)
    dims = tl.arange(0, BLOCK_D)
    tokens = (first_token + rows).to(tl.int64)
    at = query + tokens[:, None] * query_token_stride + heads[:, None] * query_head_stride + dims[None, :]
    operand = tl.load(at, mask=mine[:, None] & (dims < HEAD_DIM)[None, :], other=0.0).to(OPERANDS)
    positions = context - length + rows
    lowest = context - length + first_row
    width = SPAN * tl.cdiv(length, TOKENS)
    begin = span * width
    end = tl.minimum(begin + width, tl.minimum(lowest + TOKENS, context))  # after the last key of any query
    whole = tl.minimum((lowest + 1) // BLOCK_N * BLOCK_N, end)  # before this, every query sees every key
    if WINDOWED:
        begin = tl.maximum(begin, tl.maximum(0, lowest - window + 1) // BLOCK_N * BLOCK_N)
        whole = begin
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    highest = tl.full([BLOCK_M], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    for n in tl.range(begin, whole, BLOCK_N, num_stages=STAGES):
        keys = n + tl.arange(0, BLOCK_N)
        inside = keys >= 0
        starts = addresses(pool, pages, table, keys, inside, head, layer, KV_HEADS, LAYERS, PAGE, HEAD_DIM)
        acc, highest, total = take_block(
            acc, highest, total, operand, starts, inside, inside, scaling, softcap,
            PAGE, HEAD_DIM, BLOCK_D, CAPPED, False, PRECISION, OPERANDS,
        )  # fmt: skip
    for n in tl.range(tl.maximum(begin, whole), end, BLOCK_N, num_stages=STAGES):
        keys = n + tl.arange(0, BLOCK_N)
        inside = keys < end
        starts = addresses(pool, pages, table, keys, inside, head, layer, KV_HEADS, LAYERS, PAGE, HEAD_DIM)
        back = positions[:, None] - keys[None, :]
        seen = (back >= 0) & inside[None, :]
        if WINDOWED:
            seen = seen & (back < window)
        acc, highest, total = take_block(
            acc, highest, total, operand, starts, seen, inside, scaling, softcap,
            PAGE, HEAD_DIM, BLOCK_D, CAPPED, True, PRECISION, OPERANDS,
        )  # fmt: skip
    sink = tl.zeros([BLOCK_M], dtype=tl.float32)
    if SINKS:
        sink = tl.load(sinks + heads).to(tl.float32)
    parts = ((tl.load(slots + block) + span).to(tl.int64) * KV_HEADS + head) * BLOCK_M + members
    store_result(
        out, partial_out, partial_log, tokens * (KV_HEADS * GROUP) + heads, parts, mine,
        tl.load(counts + block) == 1, acc, highest, total, sink, HEAD_DIM, BLOCK_D, SINKS,
    )  # fmt: skip
