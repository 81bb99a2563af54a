"""Free pages as runs of neighbours."""

from bisect import bisect_left, insort
from collections.abc import Iterable


class FreeRuns:
    """NIXL costs per run, so block tables should have few."""

    def __init__(self, num_pages: int) -> None:
        self._length: dict[int, int] = {}  # first page -> length
        self._first: dict[int, int] = {}  # page after the last -> first page
        self._of_length: dict[int, dict[int, None]] = {}  # length -> first pages
        self._lengths: list[int] = []  # sorted
        self._num_free = 0
        if num_pages:
            self._put(0, num_pages)

    def __len__(self) -> int:
        return self._num_free

    @property
    def longest(self) -> int:
        return self._lengths[-1] if self._lengths else 0

    def pages(self) -> list[int]:
        return [page for first, length in sorted(self._length.items()) for page in range(first, first + length)]

    def take(self, count: int, after: int | None = None) -> list[int]:
        """Take `count` free pages: those after page `after` first, then the fewest runs."""
        taken: list[int] = []
        if after is not None and after + 1 in self._length:
            taken += self._cut(after + 1, count)
        while len(taken) < count:
            missing = count - len(taken)
            taken += self._cut(self._best_run(missing), missing)
        return taken

    def give(self, pages: Iterable[int]) -> None:
        first = end = -1
        for page in sorted(pages):
            if page != end:
                if end > first:
                    self._join(first, end)
                first = page
            end = page + 1
        if end > first:
            self._join(first, end)

    def _join(self, first: int, end: int) -> None:
        if first in self._first:
            first = self._first[first]
            self._pull(first)
        if end in self._length:
            end += self._pull(end)
        self._put(first, end - first)

    def _best_run(self, count: int) -> int:
        """First page of a shortest run that fits, else of a longest one."""
        at = min(bisect_left(self._lengths, count), len(self._lengths) - 1)
        alike = self._of_length[self._lengths[at]]
        first, _ = alike.popitem()  # finding a dict's first key skips all deleted ones
        alike[first] = None
        return first

    def _cut(self, first: int, count: int) -> list[int]:
        """Take up to `count` pages of the run at `first`."""
        length = self._pull(first)
        if count < length:
            self._put(first + count, length - count)
        return list(range(first, first + min(count, length)))

    def _put(self, first: int, length: int) -> None:
        self._length[first] = length
        self._first[first + length] = first
        self._num_free += length
        if length in self._of_length:
            self._of_length[length][first] = None
        else:
            self._of_length[length] = {first: None}
            insort(self._lengths, length)

    def _pull(self, first: int) -> int:
        length = self._length.pop(first)
        del self._first[first + length]
        self._num_free -= length
        alike = self._of_length[length]
        del alike[first]
        if not alike:
            del self._of_length[length]
            del self._lengths[bisect_left(self._lengths, length)]
        return length
