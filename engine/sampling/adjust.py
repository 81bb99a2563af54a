"""Penalties, bias and masks for logits on a CPU."""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from engine.sampling.allowed import allowed_words, bits_of
from engine.sampling.row import Row
from engine.sampling.seen import SeenTokens

SPARE: Final = 32  # entries per row, after which the table is rebuilt

Floats = npt.NDArray[np.float32]
Numbered = Sequence[tuple[int, Row]]  # rows with their indices in the batch


class Penalties:
    """Has a table of the tokens seen so far, of which each draw only updates the entries of new tokens.

    Repetition is applied first, and multiplies negative logits, because division would reward it. Presence and frequency
    count only generated tokens.

    Source: repetition, Keskar et al. 2019, arXiv:1909.05858; the others, OpenAI's API reference.
    """

    def __init__(self, rows: Numbered, vocab: int) -> None:
        self._rows = [row for _, row in rows]
        self._firsts = [i * vocab for i, _ in rows]  # start of each row in flattened logits
        params = [row.params for row in self._rows]
        self._repetition = np.array([p.repetition_penalty for p in params], dtype=np.float32)
        self._presence = np.array([p.presence_penalty for p in params], dtype=np.float32)
        self._frequency = np.array([p.frequency_penalty for p in params], dtype=np.float32)
        self._make_table()

    def apply(self, logits: torch.Tensor) -> None:
        self._update()
        where = self._where[: self._size]
        values = logits.view(-1).index_select(0, where)
        repetition = self._repetitions[: self._size]
        penalised = values.clamp(min=0).div_(repetition).add_(values.clamp_(max=0).mul_(repetition))
        logits.view(-1).scatter_(0, where, penalised.sub_(self._subtracted[: self._size]))

    def _make_table(self) -> None:
        """Each row and seen token has an entry: index of the logit, repetition penalty, subtrahend."""
        self._seen: list[SeenTokens] = [seen_by(row) for row in self._rows]
        lengths = [len(seen.ids) for seen in self._seen]
        self._size = sum(lengths)
        # tokens known now have consecutive entries; later tokens may have any
        self._known = lengths
        self._begins = [*map(int, np.cumsum([0, *lengths[:-1]]))]
        self._later: list[list[int]] = [[] for _ in self._rows]
        spare = SPARE * len(self._rows)
        which = np.repeat(np.arange(len(self._rows)), lengths)
        where = np.concatenate([seen.ids + first for seen, first in zip(self._seen, self._firsts, strict=True)])
        counts = np.concatenate([seen.counts for seen in self._seen])
        self._where = torch.from_numpy(np.pad(where, (0, spare)))
        self._repetitions = torch.from_numpy(np.pad(self._repetition[which], (0, spare)))
        self._subtracted = torch.from_numpy(np.pad(self._subtractions(which, counts), (0, spare)))

    def _update(self) -> None:
        entries: list[int] = []
        which: list[int] = []
        counts: list[float] = []
        ids: list[int] = []
        for i, (seen, row) in enumerate(zip(self._seen, self._rows, strict=True)):
            for at in seen.update(row.tokens):
                entries.append(self._entry(i, at))
                which.append(i)
                counts.append(seen.counts[at])
                ids.append(self._firsts[i] + seen.ids[at])
        if self._size > len(self._where):
            self._make_table()
        elif entries:
            index = torch.tensor(entries)
            rows = np.array(which)
            subtracted = self._subtractions(rows, np.array(counts, dtype=np.float32))
            self._where.index_copy_(0, index, torch.tensor(ids))
            self._repetitions.index_copy_(0, index, torch.from_numpy(self._repetition[rows]))
            self._subtracted.index_copy_(0, index, torch.from_numpy(subtracted))

    def _entry(self, i: int, at: int) -> int:
        if at < self._known[i]:
            return self._begins[i] + at
        later = self._later[i]
        if at - self._known[i] == len(later):
            later.append(self._size)
            self._size += 1
        return later[at - self._known[i]]

    def _subtractions(self, rows: npt.NDArray[np.int64], counts: Floats) -> Floats:
        return self._frequency[rows] * counts + self._presence[rows] * (counts > 0)


def seen_by(row: Row) -> SeenTokens:
    if row.seen is None:
        prompt = row.tokens[: row.start] if row.params.repetition_penalty != 1 else ()
        row.seen = SeenTokens(prompt, row.start)
    row.seen.update(row.tokens)
    return row.seen


class Adjustments:
    def __init__(self, rows: Sequence[Row], vocab: int) -> None:
        self._vocab = vocab
        numbered = [(i, row) for i, row in enumerate(rows) if row.adjusts]
        penalised = [(i, row) for i, row in numbered if row.penalised]
        self._penalties = Penalties(penalised, vocab) if penalised else None
        biased = [(i, row) for i, row in numbered if row.params.logit_bias]
        self._bias: tuple[torch.Tensor, torch.Tensor] | None = None
        if biased:
            values = np.array([value for _, row in biased for _, value in row.params.logit_bias], dtype=np.float32)
            where = self._flat(biased, lambda row: [token for token, _ in row.params.logit_bias])
            self._bias = where, torch.from_numpy(values)
        self._masked = [(i, row) for i, row in numbered if row.mask is not None]
        self._masked_index = torch.tensor([i for i, _ in self._masked], dtype=torch.int64)
        self._all_masked = len(self._masked) == len(rows)
        self._must_go_on = [(i, row) for i, row in numbered if row.mask is None and row.params.min_tokens]

    def apply(self, logits: torch.Tensor) -> None:
        """Adjust `logits`, contiguous float32 [B, vocab], in place."""
        if self._penalties is not None:
            self._penalties.apply(logits)
        if self._bias is not None:
            logits.view(-1).index_add_(0, *self._bias)
        if self._masked:
            self._mask(logits)
        if unfinished := [(i, row) for i, row in self._must_go_on if row.must_go_on]:
            logits.view(-1).index_fill_(0, self._flat(unfinished, lambda row: row.end_ids), -torch.inf)

    def _mask(self, logits: torch.Tensor) -> None:
        words = allowed_words([row for _, row in self._masked], self._vocab)
        banned = torch.from_numpy(bits_of(~words, self._vocab))
        if self._all_masked:  # copying rows would take longer
            logits.masked_fill_(banned, -torch.inf)
            return
        index = self._masked_index
        logits.index_copy_(0, index, logits[index].masked_fill_(banned, -torch.inf))

    def _flat(self, rows: Numbered, ids: Callable[[Row], npt.ArrayLike]) -> torch.Tensor:
        where = [np.asarray(ids(row), dtype=np.int64) + i * self._vocab for i, row in rows]
        return torch.from_numpy(np.concatenate(where))
