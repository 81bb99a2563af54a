"""The free pages, kept as runs of neighbours: NIXL pays per run, so a block table should have few."""

from bisect import bisect_left, insort
from collections.abc import Iterable


class FreeRuns:
    """A set of page ids as maximal runs, found by their ends and by their length: nothing looks at every one."""

    def __init__(self, num_pages: int) -> None:
        self._length: dict[int, int] = {}  # first page -> pages in the run
        self._first: dict[int, int] = {}  # page after the last -> first page
        self._of_length: dict[int, dict[int, None]] = {}  # pages in the run -> first pages
        self._lengths: list[int] = []  # those that there are, in order
        self._num_free = 0
        if num_pages:
            self._put(0, num_pages)

    def __len__(self) -> int:
        """Free pages."""
        return self._num_free

    @property
    def longest(self) -> int:
        """Pages in the longest run."""
        return self._lengths[-1] if self._lengths else 0

    def pages(self) -> list[int]:
        """Every free page, in order."""
        return [page for first, length in sorted(self._length.items()) for page in range(first, first + length)]

    def take(self, count: int, after: int | None = None) -> list[int]:
        """Take `count` pages, at most len(self): those that follow page `after` first, then the fewest runs."""
        taken: list[int] = []
        if after is not None and after + 1 in self._length:
            taken += self._cut(after + 1, count)
        while len(taken) < count:
            missing = count - len(taken)
            taken += self._cut(self._best_run(missing), missing)
        return taken

    def give(self, pages: Iterable[int]) -> None:
        """Make `pages` free, joining them with each other and with their neighbours."""
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
        """Pages from `first` to the one before `end` are free, and one run with those on both sides."""
        if first in self._first:
            first = self._first[first]
            self._pull(first)
        if end in self._length:
            end += self._pull(end)
        self._put(first, end - first)

    def _best_run(self, count: int) -> int:
        """First page of one of the shortest runs that hold `count` pages, else of one of the longest."""
        at = min(bisect_left(self._lengths, count), len(self._lengths) - 1)
        alike = self._of_length[self._lengths[at]]
        first, _ = alike.popitem()  # whoever looks for one of a dict, or set, walks past all that were taken out before
        alike[first] = None
        return first

    def _cut(self, first: int, count: int) -> list[int]:
        """Take up to `count` pages from the head of the run that starts at `first`."""
        length = self._pull(first)
        if count < length:
            self._put(first + count, length - count)
        return list(range(first, first + min(count, length)))

    def _put(self, first: int, length: int) -> None:
        """A run begins at `first`."""
        self._length[first] = length
        self._first[first + length] = first
        self._num_free += length
        if length in self._of_length:
            self._of_length[length][first] = None
        else:
            self._of_length[length] = {first: None}
            insort(self._lengths, length)

    def _pull(self, first: int) -> int:
        """The run at `first` is no more. Returns: its length."""
        length = self._length.pop(first)
        del self._first[first + length]
        self._num_free -= length
        alike = self._of_length[length]
        del alike[first]
        if not alike:
            del self._of_length[length]
            del self._lengths[bisect_left(self._lengths, length)]
        return length
