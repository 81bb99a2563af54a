"""The answers of a lone engine to the requests of a run, and the KV that pages must hold."""

from collections.abc import Iterator
from functools import cache
from itertools import count
from pathlib import Path
from typing import Final
from zlib import crc32

from components.wire.layout import KvLayout, of_shard
from components.wire.tokens import block_hashes, pack_tokens
from engine.core.engine_core import EngineCore
from engine.mock.marked_pages import BLOCK, Mark
from engine.ports import EngineRequest
from tests.faults.clients import Answer, Client
from tests.faults.nodes import make_engine
from tests.faults.setup import ADAPTER, WEIGHTS

POOL_TOKENS: Final = 1 << 14
_ids: Final = count()

Checksums = list[int]  # of a block, up to each token


@cache
def _engine(home: Path) -> EngineCore:
    """One engine for all runs: its answers do not depend on earlier requests."""
    return make_engine(home, BLOCK, {ADAPTER: WEIGHTS}, POOL_TOKENS)


class Reference:
    def __init__(self, home: Path) -> None:
        self._engine = _engine(home)
        self._sequences: list[tuple[str, list[int]]] = []  # the adapter; a prompt with its whole answer

    def answers(self, clients: list[Client]) -> dict[Client, list[Answer]]:
        """Return each client's answers, by choice."""
        core = self._engine
        core._runner._busy_until_s = 0.0  # type: ignore[attr-defined]  # that was the clock of the run before
        requests = {f"{next(_ids)}": (client, prompt) for client in clients for prompt in client.prompts}
        for name, (client, prompt) in requests.items():
            core.submit(EngineRequest(name, prompt, client.sampling, adapter=client.adapter))
        tokens: dict[str, list[int]] = {name: [] for name in requests}
        finishes: dict[str, str] = {}
        while len(finishes) < len(requests):
            for output in core.step().tokens:
                tokens[output.request_id] += output.token_ids
                if output.finish is not None:
                    finishes[output.request_id] = str(output.finish)
        found: dict[Client, list[Answer]] = {client: [] for client in clients}
        for name, (client, prompt) in requests.items():
            found[client].append(Answer(tokens[name], finishes[name]))
            self._sequences.append((client.adapter, [*prompt, *tokens[name]]))
        return found

    def wrong_pages(self, cores: dict[str, EngineCore]) -> Iterator[str]:
        """Yield each page of the prefix caches whose KV differs from its block hash on any rank. `cores`: by instance."""
        named: dict[tuple[int, str], dict[bytes, list[Checksums]]] = {}
        for instance, core in cores.items():
            layout = core.kv_region.layout
            known: dict[bytes, list[Checksums]] = {}
            for adapter in ("", *core.adapters):
                of = layout.page_size, core.adapters.get(adapter, "")
                if of not in named:
                    named[of] = self._named(core, adapter)
                known |= named[of]
            pages = core._runner._pages  # type: ignore[attr-defined]
            for block, page in core._memory.prefix._page_of.items():
                held = [pages.marks(page, i) for i in range(layout.page_size // BLOCK)]
                wanted = known.get(block)
                if wanted is None or held != [*map(_marks, held, wanted, [layout] * len(held))]:
                    yield f"{instance}: page {page} is named {wanted} and holds {held}"

    def _named(self, core: EngineCore, adapter: str) -> dict[bytes, list[Checksums]]:
        """Return the checksums in a page, by block hash."""
        size, root = core.kv_region.layout.page_size, core._root_hash("", adapter)
        found: dict[bytes, list[Checksums]] = {}
        for of, tokens in self._sequences:
            if of != adapter:
                continue
            checksum = crc32(core.adapters[adapter].encode()) if adapter else 0
            checksums: list[Checksums] = []
            for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
                of_block = [crc32(pack_tokens(tokens[start : start + n]), checksum) for n in range(1, BLOCK + 1)]
                checksum = of_block[-1]
                checksums.append(of_block)
            blocks = size // BLOCK
            for i, block in enumerate(block_hashes(tokens, size, root)):
                if i < len(tokens) // size:
                    found[block] = checksums[i * blocks : (i + 1) * blocks]
        return found


def _marks(held: list[Mark], checksums: Checksums, layout: KvLayout) -> list[Mark]:
    """The marks that a full block must have. Only `held` has the number of its tokens that were not generated one by one."""
    ranks = (of_shard(layout, rank, layout.shards) for rank in range(layout.shards))
    heads = [head for rank in ranks for head in rank.heads for _ in ("first stripe", "last stripe")]
    marked = min(max(held[0][1], 1), BLOCK)
    inner = [(marked, marked, head, checksums[marked - 1]) for head in heads]
    first, last = ((BLOCK, marked, head, checksums[-1]) for head in (heads[0], heads[-1]))
    return [first, *inner[1:-1], last]
