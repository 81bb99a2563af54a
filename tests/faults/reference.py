"""What an engine alone says to the requests of a run, and what pages that hold their KV must say."""

from collections.abc import Iterator
from functools import cache
from itertools import count
from pathlib import Path
from typing import Final
from zlib import crc32

from components.wire.tokens import block_hashes, pack_tokens
from engine.core.engine_core import EngineCore
from engine.mock.marked_pages import BLOCK, MARK
from engine.ports import EngineRequest
from tests.faults.clients import Answer, Client
from tests.faults.nodes import make_engine
from tests.faults.setup import ADAPTER, WEIGHTS

POOL_TOKENS: Final = 1 << 14
_ids: Final = count()


@cache
def _engine(home: Path) -> EngineCore:
    """One for all runs: what it says depends on nothing that it was asked before."""
    return make_engine(home, BLOCK, {ADAPTER: WEIGHTS}, POOL_TOKENS)


class Reference:
    """Of one run."""

    def __init__(self, home: Path) -> None:
        self._engine = _engine(home)
        self._sequences: list[tuple[str, list[int]]] = []  # the adapter; a prompt with its whole answer

    def answers(self, clients: list[Client]) -> dict[Client, list[Answer]]:
        """For each choice of each client."""
        core = self._engine
        core._runner._busy_until_s = 0.0  # type: ignore[attr-defined]  # by the clock of the run before
        asked = {f"{next(_ids)}": (client, prompt) for client in clients for prompt in client.prompts}
        for name, (client, prompt) in asked.items():
            core.submit(EngineRequest(name, prompt, client.sampling, adapter=client.adapter))
        tokens: dict[str, list[int]] = {name: [] for name in asked}
        finishes: dict[str, str] = {}
        while len(finishes) < len(asked):
            for output in core.step().tokens:
                tokens[output.request_id] += output.token_ids
                if output.finish is not None:
                    finishes[output.request_id] = str(output.finish)
        found: dict[Client, list[Answer]] = {client: [] for client in clients}
        for name, (client, prompt) in asked.items():
            found[client].append(Answer(tokens[name], finishes[name]))
            self._sequences.append((client.adapter, [*prompt, *tokens[name]]))
        return found

    def wrong_pages(self, cores: dict[str, EngineCore]) -> Iterator[str]:
        """Every page that a prompt may find must hold what its name says; `cores` by the instance."""
        named: dict[tuple[int, str], dict[bytes, list[tuple[int, int]]]] = {}
        for instance, core in cores.items():
            size = core.kv_region.layout.page_size
            known: dict[bytes, list[tuple[int, int]]] = {}
            for adapter in ("", *core.adapters):
                of = size, core.adapters.get(adapter, "")
                if of not in named:
                    named[of] = self._named(core, adapter)
                known |= named[of]
            pages = core._runner._pages  # type: ignore[attr-defined]
            for block, page in core._memory.prefix._page_of.items():
                wanted = known.get(block)
                for copy in (0, 1):  # of each mark
                    places = [pages._places([page], i)[copy] for i in range(size // BLOCK)]
                    held = [MARK.unpack_from(pages._memory, place) for place in places]
                    if held != wanted:
                        yield f"{instance}: page {page} is named {wanted} and holds {held}"

    def _named(self, core: EngineCore, adapter: str) -> dict[bytes, list[tuple[int, int]]]:
        """What pages say, by block hash."""
        size, root = core.kv_region.layout.page_size, core._root_hash("", adapter)
        found: dict[bytes, list[tuple[int, int]]] = {}
        for of, tokens in self._sequences:
            if of != adapter:
                continue
            checksum = crc32(core.adapters[adapter].encode()) if adapter else 0
            marks: list[tuple[int, int]] = []
            for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
                checksum = crc32(pack_tokens(tokens[start : start + BLOCK]), checksum)
                marks.append((BLOCK, checksum))
            blocks = size // BLOCK
            for i, block in enumerate(block_hashes(tokens, size, root)):
                if i < len(tokens) // size:
                    found[block] = marks[i * blocks : (i + 1) * blocks]
        return found
