"""Pages that the pool evicts to main memory. Their ids follow those of the pool."""

from collections import OrderedDict
from collections.abc import Callable, Container, Sequence

from components.errors import PageLeak

CopyPages = Callable[[Sequence[tuple[int, int]]], None]  # takes (source, target) pages; returns when all are copied


class OffloadedPages:
    """Evicted blocks. If there is no room, the oldest block is dropped.

    Copies finish before other calls begin, so no page is reallocated while it is read or written.
    """

    def __init__(
        self,
        first: int,
        count: int,
        *,
        rename: Callable[[int, int], None],
        forget: Callable[[int], object],
        copy_pages: CopyPages,
    ) -> None:
        """`first`: the lowest id. `rename`, `forget`: functions of the prefix cache."""
        self._ids = range(first, first + count)
        self._free = list(reversed(self._ids))
        self._kept: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._leaving = 0  # number of pages that are being restored
        self._rename = rename
        self._forget = forget
        self._copy_pages = copy_pages
        self.num_restored = 0

    @property
    def room(self) -> int:
        return len(self._ids)

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, pages: Sequence[int]) -> None:
        """Copy evicted pages here, and rename them. If there is not room for all, the first ones are dropped."""
        room = len(self._ids) - self._leaving
        lost = max(0, len(pages) - room)
        for page in pages[:lost]:
            self._forget(page)
        moves = [(page, self._place()) for page in pages[lost:]]
        for page, place in moves:
            self._rename(page, place)
            self._kept[place] = None
        if moves:
            self._copy_pages(moves)

    def leave(self, places: Sequence[int]) -> None:
        """Take pages out before `restore`, because allocating pool pages for them may evict others to here."""
        for place in places:
            del self._kept[place]
        self._leaving += len(places)

    def restore(self, places: Sequence[int], pages: Sequence[int]) -> None:
        """Copy pages that `leave` took out to `pages` of the pool, and rename them."""
        moves = list(zip(places, pages, strict=True))
        self._copy_pages(moves)
        for place, page in moves:
            self._rename(place, page)
        self._leaving -= len(moves)
        self._free += places
        self.num_restored += len(moves)

    def drop(self, place: int) -> None:
        del self._kept[place]
        self._free.append(place)

    def check(self, named: Container[int]) -> None:
        """Raises: PageLeak, unless each place is either free, or kept and in the prefix cache."""
        unnamed = [place for place in self._kept if place not in named]
        if sorted([*self._free, *self._kept]) != list(self._ids) or self._leaving or unnamed:
            raise PageLeak(
                f"{len(self._free)} free + {len(self._kept)} kept + {self._leaving} leaving pages are not each of the "
                f"{len(self._ids)} offloaded pages once; kept without a name: {unnamed}"
            )

    def _place(self) -> int:
        if self._free:
            return self._free.pop()
        place, _ = self._kept.popitem(last=False)
        self._forget(place)
        return place
