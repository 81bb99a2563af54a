"""Block tables, admission, and publication to the prefix cache."""

from collections.abc import Collection
from typing import Final

from components.wire.tokens import block_hashes
from engine.kv.page_pool import PagePool, PrefixCache
from engine.scheduler.request import ENDS_WITH_PROMPT, Request

LEAST_COMPUTED: Final = 2  # last prompt tokens, always computed for their logits; `chunk_length` says why two


class RequestMemory:
    """Gives pages to requests; the only user of `PagePool`."""

    def __init__(self, num_pages: int, page_size: int, reserve_tokens: int, *, kv_events: bool = False) -> None:
        self.prefix = PrefixCache(tells=kv_events)
        self.pool = PagePool(num_pages, self.prefix)
        self.page_size = page_size
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._reserve_tokens = reserve_tokens
        self._most_promised = self._pages_for(reserve_tokens) + 1  # pages that a request may still need

    def fits(self, request: Request, others: Collection[Request], before: Collection[Request] = ()) -> bool:
        """Whether pages suffice for `request` with its reserve, for `others`, and for those `before` it.

        A request that fits the empty pool is admitted when it is alone.
        """
        found = self._match(request)
        wanted = self._pages_with_reserve(request) - len(found)
        left = self.pool.num_available - self.pool.num_cached_among(found) - wanted
        left -= sum(map(self._pages_with_reserve, before))
        if left >= len(others) * self._most_promised:  # the common case
            return True
        return left >= sum(self._pages_with_reserve(other) - len(other.pages) for other in others)

    def admit(self, request: Request) -> None:
        """Cached tokens count as computed."""
        found = self._match(request)
        self.pool.share(found)
        missing = self._pages_for(len(request.tokens)) - len(found)
        request.pages = found + self.pool.allocate(missing, after=found[-1] if found else None)
        request.num_published = len(found)
        request.num_computed = len(found) * self.page_size
        if len(request.tokens) == request.prompt_len:  # not counted again after a preemption
            request.num_cached_tokens = request.num_computed
            self.prefix_queries += request.prompt_len
            self.prefix_hits += request.num_computed

    def fork(self, request: Request, branch: Request) -> list[tuple[int, int]]:
        """Give `branch` pages of the prompt; it computes the last `LEAST_COMPUTED` tokens again.

        Returns: (source, target) pages to copy before the next step.
        """
        branch.num_computed = max(0, request.prompt_len - LEAST_COMPUTED)
        shared = request.pages[: branch.num_computed // self.page_size]
        copied = request.pages[len(shared) : self._pages_for(request.prompt_len)]
        self.pool.share(shared)
        own = self.pool.allocate(len(copied), after=shared[-1] if shared else None)
        branch.pages = shared + own
        return list(zip(copied, own, strict=True))

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Make sure that `num_tokens` have slots.

        Returns: False if a page is missing.
        """
        if num_tokens <= len(request.pages) * self.page_size:
            return True
        if not self.pool.num_available:
            return False
        request.pages += self.pool.allocate(1, after=request.pages[-1])
        return True

    def publish(self, request: Request) -> None:
        done, full = request.num_published, request.num_computed // self.page_size
        if full == done:
            return
        self.prefix.insert(self._hashes(request, full)[done:], request.pages[done:full])
        request.num_published = full

    def forget(self, request: Request) -> None:
        """Unpublish pages whose KV may be broken."""
        for page in request.pages:
            if page in self.prefix:
                self.prefix.forget(page)
        request.num_computed = 0
        request.num_published = 0

    def give_back(self, request: Request) -> None:
        full = request.num_computed // self.page_size
        # again, because the holder of an equal block may have been evicted
        self.prefix.insert(self._hashes(request, full), request.pages[:full])
        self.pool.release(request.pages)
        request.pages = []
        request.num_computed = 0
        request.num_published = 0

    def _match(self, request: Request) -> list[int]:
        if request.reads_prompt:
            return []
        if request.has_begun:  # after a preemption the last token is computed alone
            usable = (len(request.tokens) - 1) // self.page_size
        else:
            usable = usable_pages(request.prompt_len, self.page_size)
        return self.prefix.match(self._hashes(request, usable))

    def _hashes(self, request: Request, count: int) -> list[bytes]:
        known = len(request.hashes)
        if known < count:
            parent = request.hashes[-1] if known else request.root_hash
            tokens = request.tokens[known * self.page_size : count * self.page_size]
            request.hashes += block_hashes(tokens, self.page_size, parent)
        return request.hashes[:count]

    def _pages_with_reserve(self, request: Request) -> int:
        if request.phase in ENDS_WITH_PROMPT:  # its one token gets no KV here
            return self._pages_for(request.prompt_len)
        tokens = sum(request.upcoming)
        return self._pages_for(min(request.limit - 1, tokens + self._reserve_tokens))

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)


def usable_pages(prompt_len: int, page_size: int) -> int:
    """Leading full pages that a cache may provide."""
    return max(0, prompt_len - LEAST_COMPUTED) // page_size
