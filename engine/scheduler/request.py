"""A request in the scheduler: its states, its pages, and the part of it that one step computes."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum, auto
from time import time
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from components.lifecycle import Lifecycle
from components.wire.sampling import SamplingParams, branch_seed
from components.wire.step_stats import NO_DRAFTS, DraftCounts
from components.wire.tokens import block_hashes
from engine.kv.offloaded_pages import CopyPages, OffloadedPages
from engine.kv.page_pool import PagePool, PrefixCache
from engine.kv.page_store import PageStore, Staging
from engine.ports import Phase, TokenMask
from engine.sampling.row import Row

MIN_COMPUTED_TOKENS: Final = 2  # last prompt tokens, always computed for their logits; `chunk_length` explains why two


class RequestState(StrEnum):
    WAITING = auto()  # queued without pages
    RESERVED = auto()  # phase DECODE: another process is writing KV into its pages
    RUNNING = auto()
    HELD = auto()  # ended, but a transfer may still access its pages
    FINISHED = auto()  # ended; pages are kept until the step in flight lands


S = RequestState
NEXT: Final = {
    S.WAITING: {S.RESERVED, S.RUNNING, S.FINISHED},
    S.RESERVED: {S.RUNNING, S.HELD, S.FINISHED},
    S.RUNNING: {S.WAITING, S.HELD, S.FINISHED},
    S.HELD: {S.FINISHED},
}
RUNNING: Final = S.RUNNING  # enum attributes are slow
ENDS_WITH_PROMPT: Final = frozenset({Phase.PREFILL, Phase.EMBED})


class Drafter(Protocol):
    """Guesses the next tokens of one request (speculative decoding)."""

    max_drafts: int  # in a step

    def drafts(self, most: int, least_chance: float) -> Sequence[int]:
        """Return up to `most` next tokens. Each is right, together with all before it, with at least `least_chance`."""


@dataclass(slots=True, eq=False)
class Request:
    id: str
    tokens: list[int]  # prompt, then generated tokens
    prompt_len: int
    limit: int  # total number of tokens at which it ends
    sampling: SamplingParams
    phase: Phase  # DECODE becomes FULL with `deliver`, and the request `disaggregated`
    arrival: int  # order of submission
    root_hash: bytes  # parent of its first block
    pages: list[int] = field(default_factory=list)  # block table
    first_page: int = 0  # index of the first page that it holds; earlier entries are copies of that one
    hashes: list[bytes] = field(default_factory=list)  # of full pages
    num_computed: int = 0  # number of leading tokens with KV in `pages`
    num_published: int = 0  # number of leading pages that are in the prefix cache
    num_cached_tokens: int = 0
    used_at: float = 0.0  # time of its admission, as of time.time()
    may_load: bool = False  # its next pages may be in files
    was_looked_up: bool = False  # whether it has been admitted, and its prefix hit counted
    counts_hits: bool = True  # not after a preemption, when it finds its own blocks, as a branch does
    released: bool = False  # whether `release` was called before the end
    num_generated: int = 0
    draft_counts: DraftCounts = NO_DRAFTS
    eos_token_ids: frozenset[int] = frozenset()
    mask: TokenMask | None = None
    branch: int = 0  # index among the n branches
    unwanted: set[int] = field(default_factory=set)  # branches cancelled before the fork
    priority: int = 0
    adapter: str = ""
    disaggregated: bool = False  # its prompt was computed elsewhere
    pools_all: bool = False  # EMBED: needs the hidden states of all tokens
    hidden: Any = None  # EMBED: result of pooling so far
    vector: bytes = b""
    in_flight: "Chunk | None" = None  # its chunk in a launched step
    make_drafter: Callable[[Sequence[int]], Drafter] | None = None  # takes `tokens`, which the request extends
    drafter: Drafter | None = field(init=False)
    row: Row = field(init=False)
    lifecycle: Lifecycle[RequestState] = field(init=False)

    def __post_init__(self) -> None:
        self.lifecycle = Lifecycle(f"request {self.id}", NEXT, S.WAITING)
        generated_from = self.prompt_len - self.num_generated
        self.row = Row(self.sampling, self.tokens, generated_from, self.eos_token_ids, self.mask)
        self.drafter = None if self.make_drafter is None else self.make_drafter(self.tokens)

    @property
    def state(self) -> RequestState:
        return self.lifecycle.state

    @property
    def upcoming(self) -> tuple[int, int]:
        """Start and count of the tokens to compute before the next draw, after any token in flight."""
        flight = self.in_flight
        if flight is None:
            return self.num_computed, len(self.tokens) - self.num_computed
        end = flight.end
        if not flight.samples:
            return end, len(self.tokens) - end
        ends = end + 1 >= self.limit or self.phase in ENDS_WITH_PROMPT
        forks = end == self.prompt_len and self.sampling.n > 1
        return end, 0 if ends or forks else 1

    @property
    def exposed(self) -> bool:
        return self.state is S.RESERVED or (self.state is S.RUNNING and self.phase is Phase.PREFILL)

    @property
    def has_begun(self) -> bool:
        return len(self.tokens) > self.prompt_len

    @property
    def reads_prompt(self) -> bool:
        """Return whether the logits or hidden states of all prompt tokens are needed, so none may come from a cache."""
        return self.pools_all or self.reads_logits

    @property
    def reads_logits(self) -> bool:
        """Return whether log-probabilities of prompt tokens are missing."""
        logprobs = self.row.prompt_logprobs
        return logprobs is not None and len(logprobs) < self.prompt_len - 1

    def without_pages(self, **changes: Any) -> "Request":
        """Return a waiting copy that has no pages yet."""
        return replace(self, pages=[], first_page=0, num_computed=0, num_published=0, **changes)

    def forked(self, branch: int) -> "Request":
        seed = branch_seed(self.sampling.seed, branch)
        return self.without_pages(
            tokens=list(self.tokens),
            sampling=msgspec.structs.replace(self.sampling, seed=seed, n=1, prompt_logprobs=None),
            hashes=list(self.hashes),
            mask=None if self.mask is None else self.mask.fork(),
            branch=branch,
            unwanted=set(),
        )

    def advance(self, to: RequestState) -> None:
        self.lifecycle.advance(to)


class Chunk(msgspec.Struct, frozen=True, eq=False):
    """Tokens `start` to `end`, computed in one step. Drafts are tokens of it, too."""

    request: Request
    start: int
    end: int
    samples: bool  # it includes the last token, so the next one is drawn
    ahead: bool  # the last token is still being drawn by the step before
    drafts: Sequence[int] = ()  # follow the request's tokens
    draft_rows: Sequence[Row] = ()  # sampler rows for the draw after each draft

    @property
    def length(self) -> int:
        return self.end - self.start

    @property
    def is_prompt(self) -> bool:
        """Return whether it computes more than a decode and its drafts."""
        return self.length > 1 + len(self.drafts)

    @property
    def rows(self) -> Sequence[Row]:
        return (self.request.row, *self.draft_rows) if self.samples else ()

    @property
    def dropped(self) -> bool:
        return self.request.lifecycle.state is not RUNNING


class Found(NamedTuple):
    first: int  # number of leading pages that the request does not need
    pages: list[int]  # cached pages from index `first` on
    num_tokens: int  # prompt tokens that need no computation


class RequestMemory:
    """Block tables, admission, and publication to the prefix cache; the only user of `PagePool`.

    If no layer reads more than the last `window` keys, a request releases the pages before those; they stay in the prefix
    cache. A later request needs only the last window of a cached prefix. A PREFILL request keeps all pages: decode's page
    size may differ, so its offer may start at an earlier token.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        reserve_tokens: int,
        copy_pages: CopyPages,
        *,
        num_offloaded: int = 0,
        staging: Staging | None = None,
        window: int = 0,
        kv_events: bool = False,
    ) -> None:
        """`num_pages`: pages in the pool. The ids of `num_offloaded` pages follow, then those of `staging`."""
        self.prefix = PrefixCache(records_events=kv_events)
        self.offloaded = OffloadedPages(
            num_pages, num_offloaded, rename=self.prefix.move, forget=self.prefix.forget, copy_pages=copy_pages
        )
        self.pool = PagePool(num_pages, self.prefix, self.offloaded if num_offloaded else None)
        self.store: PageStore | None = None
        if staging is not None:
            self.store = PageStore(staging, num_pages + num_offloaded, self.prefix.page_of, copy_pages)
        self._copy_pages = copy_pages
        self.page_size = page_size
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._reserve_tokens = reserve_tokens
        self._most_promised = self._pages_for(reserve_tokens) + 1  # pages that a request may still need
        # because branches compute the last tokens again
        # with a window shorter than a page, released entries could refer to the page that is being filled
        self._kept_tokens = window + MIN_COMPUTED_TOKENS - 1 if window >= page_size else 0
        self._kept_pages = self._pages_for(self._kept_tokens)  # last full pages that are kept

    def fits(self, request: Request, others: Collection[Request], before: Collection[Request] = ()) -> bool:
        """Return whether there are enough pages for `request` with its reserve, for `others`, and for those `before` it.

        A request that fits into the empty pool is always admitted if it is alone.
        """
        first, found, _ = self._match(request)
        wanted = self._most_held(request, first) - len(found) + self.pool.num_offloaded_among(found)
        left = self.pool.num_available - self.pool.num_cached_among(found) - wanted
        left -= sum(self._most_held(other, self._first_at_start(other)) for other in before)
        if left >= len(others) * self._most_promised:  # the common case
            return True
        # a request that got a page beyond its reserve for drafts needs no more pages, and returns none
        more = (max(0, self._most_held(r, r.first_page) + r.first_page - len(r.pages)) for r in others)
        return left >= sum(more)

    def admit(self, request: Request) -> None:
        """Allocate pages. Cached tokens count as computed, as do tokens of a DECODE request that no layer reads."""
        first, found, num_tokens = self._match(request)
        found = self.pool.hold(found)
        missing = self._pages_for(len(request.tokens)) - first - len(found)
        held = found + self.pool.allocate(missing, after=found[-1] if found else None)
        request.pages = held[:1] * first + held
        request.first_page = first
        request.num_published = first + len(found)
        request.num_computed = request.num_published * self.page_size
        request.used_at = time()
        request.may_load = self.store is not None
        request.counts_hits = not request.was_looked_up
        request.was_looked_up = True
        if request.counts_hits:
            request.num_cached_tokens = num_tokens
            self.prefix_queries += request.prompt_len
            self.prefix_hits += num_tokens

    def load(self, request: Request, most: int) -> int:
        """Fill up to `most` pages after the cached ones from files. Call it before a step computes the request.

        Returns: how many were filled. If `may_load` is still true, another call may fill more.
        """
        assert self.store is not None
        assert request.in_flight is None, "its pages are being written"
        hashes, first = self._hashes(request, self._usable(request)), request.num_published
        wanted = hashes[first : first + most]
        loaded = self.store.load(wanted, request.pages[first : first + len(wanted)])
        request.num_published = end = first + loaded
        request.num_computed = end * self.page_size
        self.pool.publish(hashes[first:end], request.pages[first:end])
        if request.counts_hits:
            request.num_cached_tokens += loaded * self.page_size
            self.prefix_hits += loaded * self.page_size
        request.may_load = loaded == len(wanted) and end < len(hashes)
        if not request.may_load:
            self.store.used(hashes[:end], request.used_at)
        return loaded

    def fork(self, request: Request, branch: Request) -> None:
        """Let `branch` share the prompt's pages; it computes the last `MIN_COMPUTED_TOKENS` tokens again."""
        branch.num_computed = max(0, request.prompt_len - MIN_COMPUTED_TOKENS)
        branch.first_page = request.first_page
        branch.num_published = num_shared = branch.num_computed // self.page_size
        shared = request.pages[branch.first_page : num_shared]
        copied = request.pages[num_shared : self._pages_for(request.prompt_len)]
        self.pool.share(shared)
        own = self.pool.allocate(len(copied), after=shared[-1] if shared else None)
        held = shared + own
        branch.pages = held[:1] * branch.first_page + held
        if copied:
            self._copy_pages(list(zip(copied, own, strict=True)))

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Allocate a page if `num_tokens` tokens, which need at most one more, have no slots. Return False if none is free."""
        if num_tokens <= len(request.pages) * self.page_size:
            return True
        if not self.pool.num_available:
            return False
        request.pages += self.pool.allocate(1, after=request.pages[-1])
        return True

    def computed(self, request: Request) -> None:
        """Publish newly filled pages, and release pages that no layer's window reaches any more."""
        done, full = request.num_published, request.num_computed // self.page_size
        if full > done:
            self._publish(request, done, full)
            request.num_published = full
        if self._kept_tokens and request.phase is not Phase.PREFILL:
            self._release_before_window(request)

    def forget(self, request: Request) -> None:
        """Unpublish blocks whose KV may be wrong, including those in pages that were released."""
        hashes = self._hashes(request, request.num_published)
        for block in hashes:
            self.pool.forget(block)
        self._delete(hashes)
        self._distrust(request)
        request.num_computed = 0
        request.num_published = 0

    def give_back(self, request: Request) -> None:
        first, full = request.first_page, request.num_computed // self.page_size
        self._publish(request, first, full)  # again, because the page with an equal block may have been evicted
        self.pool.release(request.pages[first:])
        request.pages = []
        request.first_page = 0
        request.num_computed = 0
        request.num_published = 0

    def _publish(self, request: Request, first: int, full: int) -> None:
        """Publish pages from `first` to `full`. If the request shares a broken page, its own pages may be broken, too."""
        if not self.pool.trusts(request.pages):
            self._distrust(request)
            return
        self.pool.publish(self._hashes(request, full)[first:], request.pages[first:full])
        if self.store is not None:
            self._save(request, self.store, full)

    def can_save(self) -> bool:
        return self.store is not None and self.store.can_save()

    def _save(self, request: Request, store: PageStore, full: int) -> None:
        """Let the store save new pages that were computed here. Prefill saves those of its prompts."""
        first = request.num_published
        if request.disaggregated:
            first = max(first, request.prompt_len // self.page_size)
        if first < full and request.phase is not Phase.EMBED:
            store.add(self._hashes(request, full)[first:], request.used_at, first)

    def _distrust(self, request: Request) -> None:
        self._delete(self.pool.distrust(request.pages[request.first_page :]))

    def _delete(self, blocks: Sequence[bytes]) -> None:
        if self.store is not None and blocks:
            self.store.remove(blocks)

    def num_cached(self, blocks: Sequence[bytes]) -> int:
        """Return the number of leading tokens that need no computation. Other threads may call this for an estimate."""
        _, _, num_blocks = self._find(blocks)
        return num_blocks * self.page_size

    def _release_before_window(self, request: Request) -> None:
        first = self._first_needed(request.num_computed)
        if first > request.first_page:
            self.pool.release(request.pages[request.first_page : first])
            # so that a kernel that loads a whole block of keys does not read another request's
            request.pages[:first] = request.pages[first : first + 1] * first
            request.first_page = first

    def _match(self, request: Request) -> Found:
        if request.reads_prompt:
            return Found(0, [], 0)
        hashes = self._hashes(request, self._usable(request))
        if request.phase is Phase.PREFILL:
            pages = self.prefix.match(hashes)
            return Found(0, pages, len(pages) * self.page_size)
        first, pages, num_blocks = self._find(hashes)
        if (start := self._first_at_start(request)) > first:
            first, pages = start, pages[start - first :]
        return Found(first, pages, num_blocks * self.page_size)

    def _usable(self, request: Request) -> int:
        """Number of leading full pages that may come from a cache."""
        if request.reads_prompt:
            return 0
        if request.has_begun:  # after a preemption, the last token is computed alone
            return (len(request.tokens) - 1) // self.page_size
        return usable_pages(request.prompt_len, self.page_size)

    def _find(self, hashes: Sequence[bytes]) -> tuple[int, list[int], int]:
        """Returns: the number of leading pages not needed, the cached pages after those, and the number of cached blocks."""
        if not self._kept_pages:
            pages = self.prefix.match(hashes)
            return 0, pages, len(pages)
        first, pages = self.prefix.match_last(hashes, self._kept_pages)
        return first, pages, first + len(pages)

    def _hashes(self, request: Request, count: int) -> list[bytes]:
        known = len(request.hashes)
        if known < count:
            parent = request.hashes[-1] if known else request.root_hash
            tokens = request.tokens[known * self.page_size : count * self.page_size]
            request.hashes += block_hashes(tokens, self.page_size, parent)
        return request.hashes[:count]

    def _first_needed(self, num_computed: int) -> int:
        """Index of the first page that tokens after `num_computed` read."""
        return max(0, num_computed - self._kept_tokens) // self.page_size if self._kept_tokens else 0

    def _first_at_start(self, request: Request) -> int:
        """Index of the first page that the request computes or receives."""
        return self._first_needed(request.prompt_len) if request.phase is Phase.DECODE else 0

    def _most_held(self, request: Request, first: int) -> int:
        """Maximum number of pages from `first` on that it may hold at one time, with its reserve."""
        if request.phase in ENDS_WITH_PROMPT:  # its one token gets no KV here
            return self._pages_for(request.prompt_len) - first
        tokens = sum(request.upcoming)
        most = self._pages_for(min(request.limit - 1, tokens + self._reserve_tokens))
        if self._kept_pages:
            most = min(most, max(len(request.pages), self._pages_for(tokens), first + self._kept_pages + 2))
        return most - first

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)


def usable_pages(prompt_len: int, page_size: int) -> int:
    """Number of leading full pages that a cache may provide."""
    return max(0, prompt_len - MIN_COMPUTED_TOKENS) // page_size
