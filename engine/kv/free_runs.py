"""The free pages, kept as runs of neighbours: NIXL pays per run, so a block table should have few."""


class FreeRuns:
    """A set of page ids as maximal runs; giving back and growing in place are O(1), taking looks at every run."""

    def __init__(self, num_pages: int) -> None:
        self._length = {0: num_pages} if num_pages else {}  # first page -> pages in the run
        self._first = {num_pages: 0} if num_pages else {}  # page after the last -> first page
        self._num_free = num_pages

    def __len__(self) -> int:
        """Free pages."""
        return self._num_free

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

    def give(self, page: int) -> None:
        """Make `page` free, joining it with its neighbours."""
        first, length = page, 1
        if page in self._first:
            first = self._first.pop(page)
            length += self._length[first]
        if page + 1 in self._length:
            length += self._length.pop(page + 1)
        self._length[first] = length
        self._first[first + length] = first
        self._num_free += 1

    def _best_run(self, count: int) -> int:
        """First page of the smallest run that holds `count` pages, else of the largest run."""
        fitting = [(length, first) for first, length in self._length.items() if length >= count]
        if fitting:
            return min(fitting)[1]
        return max((length, -first) for first, length in self._length.items())[1] * -1

    def _cut(self, first: int, count: int) -> list[int]:
        """Take up to `count` pages from the head of the run that starts at `first`."""
        length = self._length.pop(first)
        cut = min(count, length)
        if cut < length:
            self._length[first + cut] = length - cut
            self._first[first + length] = first + cut
        else:
            del self._first[first + length]
        self._num_free -= cut
        return list(range(first, first + cut))
