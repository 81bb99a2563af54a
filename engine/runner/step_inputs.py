"""The inputs of a step as numbers on the host, for one device or several."""

from collections.abc import Sequence

import msgspec

from engine.scheduler.request import Chunk


class StepInputs(msgspec.Struct, frozen=True, array_like=True):
    """R requests with T tokens, in `StepShape`'s order."""

    token_ids: list[int]  # [T]; 0 for those of `ahead`
    positions: list[int]  # [T]
    keep: list[int]  # indices of the tokens whose logits are read
    ahead: list[int]  # indices of the tokens that the previous step draws
    query_lens: list[int]  # [R]
    context_lens: list[int]  # [R]
    block_tables: list[list[int]]  # [R]
    adapters: list[tuple[str, int]]  # (adapter or "", number of its tokens), in order


def inputs_of(chunks: Sequence[Chunk], wanted: Sequence[int]) -> StepInputs:
    """`chunks`: in `StepShape`'s order. `wanted`: number of last tokens of each chunk whose logits are read."""
    token_ids: list[int] = []
    positions: list[int] = []
    keep: list[int] = []
    ahead: list[int] = []
    for chunk, count in zip(chunks, wanted, strict=True):
        token_ids += chunk.request.tokens[chunk.start : chunk.end]
        token_ids += chunk.drafts
        if chunk.ahead:
            ahead.append(len(token_ids))
            token_ids.append(0)
        positions += range(chunk.start, chunk.end)
        keep += range(len(token_ids) - count, len(token_ids))
    return StepInputs(
        token_ids,
        positions,
        keep,
        ahead,
        [chunk.length for chunk in chunks],
        [chunk.end for chunk in chunks],
        [chunk.request.pages for chunk in chunks],
        [(chunk.request.adapter, chunk.length) for chunk in chunks],
    )
