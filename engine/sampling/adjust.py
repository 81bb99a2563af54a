"""What changes logits before a token is chosen: penalties, bias, tokens that may not come.

All rows of a batch go through one gather and one scatter over the tokens concerned; the rest of the vocabulary, and the
rows that ask for nothing, are not touched.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.device_copy import to_device
from engine.sampling.allowed import allowed_words, bits_of
from engine.sampling.row import Row
from engine.sampling.seen import seen_by

Numbered = Sequence[tuple[int, Row]]  # rows of a batch with their indices in it
Floats = npt.NDArray[np.float32]


def adjust(logits: torch.Tensor, rows: Sequence[Row]) -> None:
    """Overwrite the rows of `logits`, contiguous float32 [B, vocab], with what their parameters make of them."""
    numbered = [(i, row) for i, row in enumerate(rows) if row.adjusts]
    if penalised := [(i, row) for i, row in numbered if row.penalised]:
        _penalise(logits, penalised)
    if biased := [(i, row) for i, row in numbered if row.params.logit_bias]:
        values = np.array([value for _, row in biased for _, value in row.params.logit_bias], dtype=np.float32)
        logits.view(-1).index_add_(
            0, _flat(logits, biased, lambda row: [token for token, _ in row.params.logit_bias]), _to(logits, values)
        )
    if masked := [(i, row) for i, row in numbered if row.mask is not None]:
        _mask(logits, masked)
    if unfinished := [(i, row) for i, row in numbered if row.mask is None and row.must_go_on]:
        logits.view(-1).index_fill_(0, _flat(logits, unfinished, lambda row: row.end_ids), -torch.inf)


def _penalise(logits: torch.Tensor, rows: Numbered) -> None:
    """Repetition first, then presence and frequency.

    Sources: repetition, Keskar et al. 2019, arXiv:1909.05858, with negative logits multiplied, since dividing them
    would reward; the others as OpenAI's API reference defines them, over generated tokens alone.
    """
    seen = [seen_by(row) for _, row in rows]

    def spread(values: Sequence[float]) -> Floats:
        return np.repeat(np.asarray(values, dtype=np.float32), [len(s.ids) for s in seen])

    counts = np.concatenate([s.counts for s in seen])
    subtracted = spread([row.params.frequency_penalty for _, row in rows]) * counts
    subtracted += spread([row.params.presence_penalty for _, row in rows]) * (counts > 0)
    repetition = _to(logits, spread([row.params.repetition_penalty for _, row in rows]))
    where = _flat(logits, rows, lambda row: seen_by(row).ids)
    flat = logits.view(-1)
    values = flat[where]
    values = torch.where(values > 0, values / repetition, values * repetition) - _to(logits, subtracted)
    flat[where] = values


def _mask(logits: torch.Tensor, rows: Numbered) -> None:
    """Take away what may not come. In place where the whole batch is masked: copies of rows take longer than their masks."""
    vocab = logits.shape[1]
    banned = _to(logits, bits_of(~allowed_words([row for _, row in rows], vocab), vocab))
    if len(rows) == len(logits):
        logits.masked_fill_(banned, -torch.inf)
        return
    index = _to(logits, np.array([i for i, _ in rows]))
    logits.index_copy_(0, index, logits[index].masked_fill_(banned, -torch.inf))


def _flat(logits: torch.Tensor, rows: Numbered, ids: Callable[[Row], npt.ArrayLike]) -> torch.Tensor:
    """Indices of `ids` of each row into flattened logits: int64 [their number]."""
    vocab = logits.shape[1]
    return _to(logits, np.concatenate([np.asarray(ids(row), dtype=np.int64) + i * vocab for i, row in rows]))


def _to(logits: torch.Tensor, values: npt.NDArray[np.generic]) -> torch.Tensor:
    return to_device(values, logits.device)
