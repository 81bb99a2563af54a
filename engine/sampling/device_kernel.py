"""Triton kernel that adjusts, cuts and draws in one launch.

It computes the same bits as `noise` and `drawing`, so it must be launched without fused multiply-adds. Sums are of
integers, so neither their order nor the block size matters.

Tokens are not sorted. Thresholds are found by search: each pass over the tokens counts, or weighs, those below three
pivots. Before that, tokens that cannot be kept are excluded. Lane i of a block processes tokens i, i + BLOCK, …; the
top_k nearest of the lanes' nearest tokens bound the top_k nearest of all. Each lane lists its tokens within the bound.
If a list overflows, passes read the logits instead.

Source: pivots and a bound before the search, Park et al. 2026, "Qrita", arXiv:2602.01518; rejection instead of sorting,
Ye et al. 2025, "FlashInfer", arXiv:2501.01005.
"""

import triton
import triton.language as tl

from engine.sampling import drawing, noise

# columns of `sampling`, int64; floats are stored as float32 bits
START = tl.constexpr(0)  # start of the seed's stream
POSITION = tl.constexpr(1)
UNTIL = tl.constexpr(2)  # position from which the text may end
INVERSE = tl.constexpr(3)
REACH = tl.constexpr(4)
TOP_K = tl.constexpr(5)
SHARE = tl.constexpr(6)
REPETITION = tl.constexpr(7)
PRESENCE = tl.constexpr(8)
FREQUENCY = tl.constexpr(9)
COUNTS = tl.constexpr(10)  # this and the next two: lines; -1: none
BIAS = tl.constexpr(11)
ENDS = tl.constexpr(12)
COLUMNS = tl.constexpr(16)

GOLDEN = tl.constexpr(noise.GOLDEN)
FIRST = tl.constexpr(noise.FIRST)
SECOND = tl.constexpr(noise.SECOND)
SPREAD = tl.constexpr(noise.SPREAD)
LEFT = tl.constexpr(noise.LEFT)
RIGHT = tl.constexpr(noise.RIGHT)
LN_2 = tl.constexpr(noise.LN_2)
LOG2_E = tl.constexpr(noise.LOG2_E)
ROOT_HALF_BITS = tl.constexpr(noise.ROOT_HALF_BITS)
MANTISSA = tl.constexpr(noise.MANTISSA)
LOG_0 = tl.constexpr(noise.LOG[0])
LOG_1 = tl.constexpr(noise.LOG[1])
LOG_2 = tl.constexpr(noise.LOG[2])
LOG_3 = tl.constexpr(noise.LOG[3])
LOG_4 = tl.constexpr(noise.LOG[4])
LOG_5 = tl.constexpr(noise.LOG[5])
LOG_6 = tl.constexpr(noise.LOG[6])
LOG_7 = tl.constexpr(noise.LOG[7])
POWER_0 = tl.constexpr(noise.POWER[0])
POWER_1 = tl.constexpr(noise.POWER[1])
POWER_2 = tl.constexpr(noise.POWER[2])
POWER_3 = tl.constexpr(noise.POWER[3])
POWER_4 = tl.constexpr(noise.POWER[4])
POWER_5 = tl.constexpr(noise.POWER[5])
POWER_6 = tl.constexpr(noise.POWER[6])
FRACTION = tl.constexpr(2.0**noise.FRACTION_BITS)
SHIFT = tl.constexpr(noise.WEIGHT_BITS - noise.FRACTION_BITS)
WHOLE = tl.constexpr(drawing.WHOLE)
SHARE_BITS = tl.constexpr(drawing.SHARE_BITS)
UNIT = tl.constexpr(2.0**-32)
ALL_BITS = tl.constexpr(0xFFFFFFFF)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
NO_TOKEN = tl.constexpr(-1)


@triton.jit
def _mixed(word):
    word = (word ^ (word >> 30)) * FIRST
    word = (word ^ (word >> 27)) * SECOND
    return word ^ (word >> 31)


@triton.jit
def _finalised(words):
    words ^= words >> 16
    words *= LEFT
    words ^= words >> 15
    words *= RIGHT
    return words ^ (words >> 16)


@triton.jit
def _parts(values):
    shifted = values.to(tl.int32, bitcast=True) - ROOT_HALF_BITS
    mantissa = (shifted & MANTISSA) + ROOT_HALF_BITS
    return (shifted >> 23).to(tl.float32), mantissa.to(tl.float32, bitcast=True) - 1.0


@triton.jit
def _log(exponent, r):
    high = ((r * LOG_7 + LOG_6) * r + LOG_5) * r + LOG_4
    series = (((high * r + LOG_3) * r + LOG_2) * r + LOG_1) * r + LOG_0
    return exponent * LN_2 + (r + (r * r) * series)


@triton.jit
def _noise(ids, key):
    low, high = key
    words = _finalised(ids.to(tl.uint32) * SPREAD + low)
    words = _finalised(words + high)
    small = (words.to(tl.float32) + 0.5) * UNIT
    inverted = words ^ ALL_BITS  # Triton 3.7's interpreter refuses ~words
    exponent, r = _parts((inverted.to(tl.float32) + 0.5) * UNIT)
    r = tl.where(exponent == 0.0, -small, r)
    exponent, r = _parts(-_log(exponent, r))
    return -_log(exponent, r)


@triton.jit
def _weights(distances):
    scaled = tl.minimum(distances * LOG2_E, 63.0)
    whole = scaled.to(tl.int32)
    f = scaled - whole.to(tl.float32)
    high = ((f * POWER_6 + POWER_5) * f + POWER_4) * f + POWER_3
    power = ((high * f + POWER_2) * f + POWER_1) * f + POWER_0
    return ((power * FRACTION).to(tl.int64) << SHIFT) >> whole.to(tl.int64)


@triton.jit
def _share_of(total, share):
    """Return total * share / 2^30, rounded up, for total below 2^62."""
    high = total >> SHARE_BITS
    low = total & (WHOLE - 1)
    return high * share + ((low * share + (WHOLE - 1)) >> SHARE_BITS)


@triton.jit
def _float(sampling, COLUMN: tl.constexpr):
    return tl.load(sampling + COLUMN).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _logits(block, row, BLOCK: tl.constexpr):
    """Return adjusted and raw logits of a block, and their ids."""
    source, vocab, counts, bias, words, penalised, biased, masked, repetition, presence, frequency = row
    ids = block * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab
    raw = tl.load(source + ids, mask=inside, other=-float("inf")).to(tl.float32)
    logits = raw
    if penalised:
        seen = tl.load(counts + ids, mask=inside, other=0)
        number = (seen >> 1).to(tl.float32)
        divided = tl.math.div_rn(logits, tl.zeros_like(logits) + repetition)
        logits = tl.where(seen != 0, tl.where(logits > 0, divided, logits * repetition), logits)
        logits = logits - (frequency * number + tl.where(number > 0, presence, 0.0))
    if biased:
        logits = logits + tl.load(bias + ids, mask=inside, other=0.0)
    if masked:
        word = tl.load(words + ids // 32, mask=inside, other=0)
        logits = tl.where(((word >> (ids % 32)) & 1) != 0, logits, -float("inf"))
    return logits, raw, ids


@triton.jit
def _distances(block, row, scale, lists, BLOCK: tl.constexpr):
    """Return distances of a block, their int32 sort keys, and ids."""
    top, inverse = scale
    listed, list_distances, list_ids = lists
    if listed:
        where = block * BLOCK + tl.arange(0, BLOCK)
        distances = tl.load(list_distances + where)
        ids = tl.load(list_ids + where)
    else:
        logits, _raw, ids = _logits(block, row, BLOCK)
        distances = (top - logits) * inverse
    return distances, distances.to(tl.int32, bitcast=True) & MAGNITUDE, ids


@triton.jit
def _pivots(low, high):
    """Divide low..high by three numbers below high."""
    step = (high - low) // 4
    return low + step, low + 2 * step, low + 3 * step


@triton.jit
def _narrowed(low, high, pivots, enough):
    """Return the part of low..high with the first number that is enough."""
    first, second, third = pivots
    enough_first, enough_second, enough_third = enough
    new_low = tl.where(
        enough_first, low, tl.where(enough_second, first + 1, tl.where(enough_third, second + 1, third + 1))
    )
    new_high = tl.where(enough_first, first, tl.where(enough_second, second, tl.where(enough_third, third, high)))
    return new_low, new_high


@triton.jit
def _count(pivots, blocks, row, scale, lists, BLOCK: tl.constexpr):
    """Count the tokens up to each pivot."""
    a = tl.zeros([BLOCK], dtype=tl.int32)
    b = tl.zeros([BLOCK], dtype=tl.int32)
    c = tl.zeros([BLOCK], dtype=tl.int32)
    for block in range(blocks):
        _distance, order, _ids = _distances(block, row, scale, lists, BLOCK)
        a += (order <= pivots[0]).to(tl.int32)
        b += (order <= pivots[1]).to(tl.int32)
        c += (order <= pivots[2]).to(tl.int32)
    return tl.sum(a, 0), tl.sum(b, 0), tl.sum(c, 0)


@triton.jit
def _count_ties(order_of_ties, bounds, blocks, row, scale, lists, BLOCK: tl.constexpr):
    """Count the tokens at one distance with ids up to each bound."""
    a = tl.zeros([BLOCK], dtype=tl.int32)
    b = tl.zeros([BLOCK], dtype=tl.int32)
    c = tl.zeros([BLOCK], dtype=tl.int32)
    for block in range(blocks):
        _distance, order, ids = _distances(block, row, scale, lists, BLOCK)
        ties = order == order_of_ties
        a += (ties & (ids <= bounds[0])).to(tl.int32)
        b += (ties & (ids <= bounds[1])).to(tl.int32)
        c += (ties & (ids <= bounds[2])).to(tl.int32)
    return tl.sum(a, 0), tl.sum(b, 0), tl.sum(c, 0)


@triton.jit
def _weigh(pivots, last, blocks, row, scale, lists, BLOCK: tl.constexpr):
    """Weigh the tokens up to `last` and up to each pivot."""
    last_order, last_id = last
    a = tl.zeros([BLOCK], dtype=tl.int64)
    b = tl.zeros([BLOCK], dtype=tl.int64)
    c = tl.zeros([BLOCK], dtype=tl.int64)
    for block in range(blocks):
        distances, order, ids = _distances(block, row, scale, lists, BLOCK)
        kept = (order < last_order) | ((order == last_order) & (ids <= last_id))
        mass = tl.where(kept, _weights(distances), 0)
        a += tl.where(order <= pivots[0], mass, 0)
        b += tl.where(order <= pivots[1], mass, 0)
        c += tl.where(order <= pivots[2], mass, 0)
    return tl.sum(a, 0), tl.sum(b, 0), tl.sum(c, 0)


@triton.jit
def _id_of_tie(order, number, blocks, row, scale, lists, BLOCK: tl.constexpr):
    """Find the number-th token at a distance."""
    low, high = 0, row[1] - 1
    while low < high:
        bounds = _pivots(low, high)
        a, b, c = _count_ties(order, bounds, blocks, row, scale, lists, BLOCK)
        low, high = _narrowed(low, high, bounds, (a >= number, b >= number, c >= number))
    return low


@triton.jit
def _cut_to_nearest(top_k, reach, blocks, row, scale, lists, BLOCK: tl.constexpr):
    """Return sort key and id of the last of the top_k nearest tokens within `reach`."""
    low, high = 0, reach
    while low < high:
        pivots = _pivots(low, high)
        a, b, c = _count(pivots, blocks, row, scale, lists, BLOCK)
        low, high = _narrowed(low, high, pivots, (a >= top_k, b >= top_k, c >= top_k))
    before, upto, _again = _count((low - 1, low, low), blocks, row, scale, lists, BLOCK)
    last_id = row[1]
    if upto > top_k:
        last_id = _id_of_tie(low, top_k - before, blocks, row, scale, lists, BLOCK)
    return low, last_id


@triton.jit
def _cut_to_weight(least, last, blocks, row, scale, lists, BLOCK: tl.constexpr):
    """Return sort key and id of the last of the fewest nearest tokens, up to `last`, that weigh `least`."""
    low, high = 0, last[0]
    while low < high:
        pivots = _pivots(low, high)
        a, b, c = _weigh(pivots, last, blocks, row, scale, lists, BLOCK)
        low, high = _narrowed(low, high, pivots, (a >= least, b >= least, c >= least))
    before, upto, _again = _weigh((low - 1, low, low), last, blocks, row, scale, lists, BLOCK)
    last_id = tl.where(low == last[0], last[1], row[1])
    # all tokens at one distance have the same weight
    distance = (tl.zeros([BLOCK], dtype=tl.int32) + low).to(tl.float32, bitcast=True)
    each = tl.max(_weights(distance), 0)
    if upto - least >= each:  # not all of them are needed
        last_id = _id_of_tie(low, tl.cdiv(least - before, each).to(tl.int32), blocks, row, scale, lists, BLOCK)
    return low, last_id


@triton.jit
def _lane_bound(lanes, reach, top_k, least):
    """Find the distance, up to `reach`, within which lanes' nearest tokens are top_k, or for top_k 0 weigh `least`."""
    order = lanes.to(tl.int32, bitcast=True) & MAGNITUDE
    mass = _weights(lanes)
    low, high = 0, reach
    while low < high:
        middle = low + (high - low) // 2
        within = order <= middle
        if top_k > 0:
            enough = tl.sum(within.to(tl.int32), 0) >= top_k
        else:
            enough = tl.sum(tl.where(within, mass, 0), 0) >= least
        low, high = tl.where(enough, low, middle + 1), tl.where(enough, middle, high)
    return low


@triton.jit
def _collected(bound, blocks, row, scale, lists, BLOCK: tl.constexpr, DEPTH: tl.constexpr):
    """Write tokens within the bound to the lanes' lists. Return the longest length."""
    _listed, list_distances, list_ids = lists
    lane = tl.arange(0, BLOCK)
    lengths = tl.zeros([BLOCK], dtype=tl.int32)
    for block in range(blocks):
        distances, order, ids = _distances(block, row, scale, lists, BLOCK)
        within = order <= bound
        where = tl.minimum(lengths, DEPTH - 1) * BLOCK + lane
        tl.store(list_distances + where, distances, mask=within)
        tl.store(list_ids + where, ids, mask=within)
        lengths += within.to(tl.int32)
    longest = tl.max(lengths, 0)
    for entry in range(tl.minimum(longest, DEPTH)):
        tl.store(list_distances + entry * BLOCK + lane, float("inf"), mask=lengths <= entry)
        tl.store(list_ids + entry * BLOCK + lane, MAGNITUDE, mask=lengths <= entry)
    tl.debug_barrier()  # other threads may read the entries
    return longest


@triton.jit
def _best(last, key, blocks, row, scale, lists, BLOCK: tl.constexpr):
    """Find the token with the largest noise - distance up to `last`."""
    last_order, last_id = last
    best = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
    best_ids = tl.full([BLOCK], MAGNITUDE, dtype=tl.int32)
    for block in range(blocks):
        distances, order, ids = _distances(block, row, scale, lists, BLOCK)
        kept = (order < last_order) | ((order == last_order) & (ids <= last_id))
        scores = tl.where(kept, _noise(ids, key) - distances, -float("inf"))
        better = (scores > best) | ((scores == best) & (ids < best_ids))
        best = tl.where(better, scores, best)
        best_ids = tl.where(better, ids, best_ids)
    return tl.min(tl.where(best == tl.max(best, 0), best_ids, MAGNITUDE), 0)


@triton.jit
def _draw_cut(
    lanes, top_k, share, reach, key, blocks, row, scale, lists, BLOCK: tl.constexpr, DEPTH: tl.constexpr
):  # fmt: skip
    """Draw from tokens within `reach` that top_k and top_p keep."""
    least = tl.zeros([], dtype=tl.int64)
    if top_k == 0:
        _a, _b, total = _weigh((0, 0, reach), (reach, row[1]), blocks, row, scale, lists, BLOCK)
        least = _share_of(total, share)
    bound = reach
    if top_k <= BLOCK:
        bound = _lane_bound(lanes, reach, top_k, least)
    longest = _collected(bound, blocks, row, scale, lists, BLOCK, DEPTH)
    listed = longest <= DEPTH
    passes = tl.where(listed, longest, blocks)
    lists = (listed, lists[1], lists[2])
    last_order, last_id = bound, row[1]
    if top_k > 0:
        last_order, last_id = _cut_to_nearest(top_k, bound, passes, row, scale, lists, BLOCK)
        _a, _b, total = _weigh((0, 0, last_order), (last_order, last_id), passes, row, scale, lists, BLOCK)
        least = _share_of(total, share)
    if share < WHOLE:
        last_order, last_id = _cut_to_weight(least, (last_order, last_id), passes, row, scale, lists, BLOCK)
    return _best((last_order, last_id), key, passes, row, scale, lists, BLOCK)


@triton.jit
def sample_kernel(
    drawn,  # int64 [2, rows]: valid ids; the same with NO_TOKEN for NaN, infinity, or no token to draw
    logits,  # [rows, vocab]
    batch,  # int32 [rows, 2]: line of `sampling`, line of `masks` or -1
    sampling,  # int64 [slots, COLUMNS]; not named `params`, which Triton's launch reserves
    counts,  # int32 [lines, vocab]: 2 * (times generated) + (in the prompt)
    bias,  # float32 [lines, vocab]
    ends,  # int32 [lines, words_stride]: bits of tokens that do not end the text
    masks,  # int32 [lines, words_stride]: bits of allowed tokens
    list_distances,  # float32 [rows, DEPTH, BLOCK]
    list_ids,  # int32 [rows, DEPTH, BLOCK]
    vocab,
    row_stride,
    words_stride,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Draw a token for a row and count it. The grid is (rows,)."""
    number = tl.program_id(0)
    slot = tl.load(batch + 2 * number)
    mask_line = tl.load(batch + 2 * number + 1)
    own = sampling + slot.to(tl.int64) * COLUMNS
    position = tl.load(own + POSITION)
    counts_line = tl.load(own + COUNTS)
    bias_line = tl.load(own + BIAS)
    ends_line = tl.load(own + ENDS)
    must_go_on = (ends_line >= 0) & (position < tl.load(own + UNTIL))
    words = ends + tl.maximum(ends_line, 0) * words_stride
    if mask_line >= 0:
        words = masks + mask_line.to(tl.int64) * words_stride
    row = (
        logits + number.to(tl.int64) * row_stride,
        vocab,
        counts + tl.maximum(counts_line, 0) * vocab,
        bias + tl.maximum(bias_line, 0) * vocab,
        words,
        counts_line >= 0,
        bias_line >= 0,
        (mask_line >= 0) | must_go_on,
        _float(own, REPETITION),
        _float(own, PRESENCE),
        _float(own, FREQUENCY),
    )
    blocks = tl.cdiv(vocab, BLOCK)
    best = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
    best_ids = tl.full([BLOCK], MAGNITUDE, dtype=tl.int32)
    wrong = tl.zeros([BLOCK], dtype=tl.int32)
    for block in range(blocks):
        adjusted, raw, ids = _logits(block, row, BLOCK)
        wrong |= ((raw != raw) | (raw == float("inf"))).to(tl.int32)
        better = adjusted > best
        best = tl.where(better, adjusted, best)
        best_ids = tl.where(better, ids, best_ids)
    top = tl.max(best, 0)
    exists = top > -float("inf")
    token = tl.where(exists, tl.min(tl.where(best == top, best_ids, MAGNITUDE), 0), 0)
    inverse = _float(own, INVERSE)
    drawable = (tl.max(wrong, 0) == 0) & (exists | (inverse == 0.0))
    if drawable & (inverse > 0.0):
        start = tl.load(own + START).to(tl.uint64, bitcast=True)
        mixed = _mixed(start + (position + 1).to(tl.uint64) * GOLDEN)
        key = (mixed.to(tl.uint32), (mixed >> 32).to(tl.uint32))
        top_k = tl.load(own + TOP_K).to(tl.int32)
        share = tl.load(own + SHARE)
        reach = tl.load(own + REACH).to(tl.int32)
        where = number.to(tl.int64) * (DEPTH * BLOCK)
        scale = (top, inverse)
        lists = (False, list_distances + where, list_ids + where)
        if (top_k > 0) | (share < WHOLE):
            lanes = (top - best) * inverse
            token = _draw_cut(lanes, top_k, share, reach, key, blocks, row, scale, lists, BLOCK, DEPTH)
        else:
            token = _best((reach, vocab), key, blocks, row, scale, lists, BLOCK)
    tl.store(drawn + number, token.to(tl.int64))
    tl.store(drawn + tl.num_programs(0) + number, tl.where(drawable, token, NO_TOKEN).to(tl.int64))
    tl.store(own + POSITION, position + 1)
    if (counts_line >= 0) & drawable:
        count = row[2] + token
        tl.store(count, tl.load(count) + 2)
