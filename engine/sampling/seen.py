"""A text's tokens and their counts."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

NONE_SEEN: Final = 64  # initial capacity


class SeenTokens:
    def __init__(self, prompt: Sequence[int], start: int) -> None:
        """Prompt tokens have a count of 0. Generated tokens begin at index `start`."""
        self._counted = start
        distinct = np.unique(np.asarray(prompt, dtype=np.int64))
        self._index = {token: i for i, token in enumerate(distinct.tolist())}
        capacity = max(NONE_SEEN, 2 * len(distinct))
        self._ids: npt.NDArray[np.int64] = np.zeros(capacity, dtype=np.int64)
        self._counts: npt.NDArray[np.float32] = np.zeros(capacity, dtype=np.float32)
        self._ids[: len(distinct)] = distinct

    def update(self, text: Sequence[int]) -> list[int]:
        """Count new tokens. Returns: their indices in `ids`."""
        changed = []
        for token in text[self._counted :]:
            i = self._index.setdefault(token, len(self._index))
            if i == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[i] = token
            self._counts[i] += 1
            changed.append(i)
        self._counted = len(text)
        return changed

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """Distinct, [K], newest last."""
        return self._ids[: len(self._index)]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """How often each of `ids` was generated."""
        return self._counts[: len(self._index)]
