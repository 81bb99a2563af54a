"""Shows which instances have cached which prefixes, from dumps of their block hashes."""

import asyncio
import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from typing import Any, Final

from rich.console import Console

from components.errors import MeshError
from components.messaging.bus import Bus
from components.settings import MeshSettings
from components.wire.inspection import ExplainRoute
from components.wire.instances import InstanceRecord
from components.wire.kv_events import FetchKvDump, KvDumpPart, unpack_hashes
from components.wire.tokens import HASH_BYTES, block_hashes, seed_hash, unpack_tokens
from services.inspect.columns import columns
from services.inspect.mesh import Mesh, open_mesh
from services.inspect.route import first_answer

ANSWER_S: Final = 5.0
MAX_SHARED: Final = 10


@dataclass(frozen=True, slots=True)
class Prefix:
    """At most one of `text`, `token_ids` and `block` is set."""

    text: str = ""
    chat: bool = True
    token_ids: Sequence[int] = ()
    first: int | None = None  # tokens to look at, from the prompt's start; None: all
    block: str = ""  # beginning of a block hash, in hexadecimal
    adapter: str = ""
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class Cache:
    """The cached blocks of one worker."""

    record: InstanceRecord
    page_size: int
    blocks: Mapping[bytes, int]  # with their place in order of arrival: parents come first
    missing: str = ""  # why its blocks are unknown

    @property
    def num_tokens(self) -> int:
        return len(self.blocks) * self.page_size


@dataclass(frozen=True, slots=True)
class Hit:
    role: str
    instance: str
    cached_tokens: int
    missing: str = ""


@dataclass(frozen=True, slots=True)
class Shared:
    """Blocks that are cached on the same instances."""

    instances: Sequence[str]
    blocks: int
    tokens: int
    last_block: str  # hexadecimal; `--block` finds it


@dataclass(frozen=True, slots=True)
class Overview:
    caches: Sequence[dict[str, Any]] = field(default_factory=list)
    shared: Sequence[Shared] = ()


def hits(caches: Sequence[Cache], token_ids: Sequence[int], adapter: str = "", cache_salt: str = "") -> list[Hit]:
    """Return the number of a prompt's leading tokens that each instance has cached, largest first."""
    found = []
    for cache in caches:
        kv, record = cache.record.kv, cache.record
        if adapter and adapter not in record.adapters:  # its KV would be the model's own
            found.append(Hit(record.role, record.instance_id, 0, f"it has no adapter {adapter!r}"))
            continue
        model = "" if kv is None else kv.layout.model
        seed = seed_hash(model, record.adapters.get(adapter, ""), cache_salt)
        blocks = block_hashes(token_ids, cache.page_size, seed)
        count = sum(1 for _ in takewhile(cache.blocks.__contains__, blocks))
        found.append(Hit(record.role, record.instance_id, count * cache.page_size, cache.missing))
    return sorted(found, key=lambda hit: -hit.cached_tokens)


def holders(caches: Sequence[Cache], block: str) -> Mapping[str, Set[str]]:
    """Return the instances by block hash, for the hashes that begin with `block`."""
    found: dict[str, set[str]] = {}
    for cache in caches:
        for name in (held.hex() for held in cache.blocks):
            if name.startswith(block):
                found.setdefault(name, set()).add(cache.record.instance_id)
    return found


def most_shared(caches: Sequence[Cache]) -> list[Shared]:
    """Return groups of blocks that the same instances have cached, sorted by number of instances, then of blocks."""
    of_block: dict[bytes, list[str]] = {}
    page_size: dict[bytes, int] = {}
    for cache in caches:
        for block in cache.blocks:
            of_block.setdefault(block, []).append(cache.record.instance_id)
            page_size[block] = cache.page_size
    groups: dict[tuple[str, ...], list[bytes]] = {}
    for block, instances in of_block.items():
        if len(instances) > 1:
            groups.setdefault(tuple(sorted(instances)), []).append(block)
    shared = [
        Shared(instances, len(blocks), sum(page_size[block] for block in blocks), blocks[-1].hex())
        for instances, blocks in groups.items()
    ]
    return sorted(shared, key=lambda one: (-len(one.instances), -one.blocks))[:MAX_SHARED]


async def show_kv(settings: MeshSettings, console: Console, wanted: Prefix, *, as_json: bool) -> None:
    async with open_mesh(settings) as mesh:
        caches = await dumped(mesh)
        if not caches:
            raise SystemExit(f"no worker is registered in namespace {mesh.namespace}")
        token_ids = await _tokens(mesh, wanted)
    if wanted.block:
        _show_holders(console, holders(caches, wanted.block.lower()), as_json=as_json)
    elif token_ids is not None:
        found = hits(caches, token_ids, wanted.adapter, wanted.cache_salt)
        _show_hits(console, found, len(token_ids), as_json=as_json)
    else:
        _show_overview(console, caches, as_json=as_json)


async def dumped(mesh: Mesh) -> list[Cache]:
    records = [record for record in mesh.records() if record.kv is not None]
    return list(await asyncio.gather(*(_cache_of(mesh.bus, record) for record in records)))


async def _cache_of(bus: Bus, record: InstanceRecord) -> Cache:
    page_size = record.kv.layout.page_size if record.kv is not None else 0
    if not record.kv_events:
        return Cache(record, page_size, {}, "started with kv_events off")
    try:
        blocks = await _dump(bus, record)
    except MeshError as exc:
        return Cache(record, page_size, {}, exc.message)
    return Cache(record, page_size, {block: at for at, block in enumerate(blocks)})


async def _dump(bus: Bus, record: InstanceRecord) -> list[bytes]:
    """Raises: MeshError."""
    blocks, ask = bytearray(), FetchKvDump(epoch=record.epoch)
    while True:
        part = await bus.call(f"{record.subject}.kv_dump", ask, KvDumpPart, timeout_s=ANSWER_S)
        blocks += part.blocks
        first = len(blocks) // HASH_BYTES
        if not part.dump_id or first >= part.num_blocks:
            return unpack_hashes(bytes(blocks))
        ask = FetchKvDump(epoch=record.epoch, dump_id=part.dump_id, first=first)


async def _tokens(mesh: Mesh, wanted: Prefix) -> list[int] | None:
    """A frontend tokenizes a text. None: no prompt was given."""
    token_ids = list(wanted.token_ids)
    if wanted.text:
        frontends = mesh.book.of_role("frontend")
        if not frontends:
            raise SystemExit("no frontend is registered, and only a frontend can tokenize the prompt; give --token-ids")
        asked = ExplainRoute(text=wanted.text, chat=wanted.chat, adapter=wanted.adapter)
        _, answer = await first_answer(mesh.bus, frontends, asked)
        token_ids = unpack_tokens(answer.token_ids)
    if not token_ids:
        return None
    return token_ids[: wanted.first]


def _show_holders(console: Console, found: Mapping[str, Set[str]], *, as_json: bool) -> None:
    if as_json:
        console.out(json.dumps({block: sorted(held) for block, held in found.items()}), highlight=False)
        return
    if not found:
        raise SystemExit("no instance has cached a block whose hash begins with this")
    for block, instances in found.items():
        console.print(f"{block}  {' '.join(sorted(instances))}", highlight=False)


def _show_hits(console: Console, found: Sequence[Hit], num_tokens: int, *, as_json: bool) -> None:
    if as_json:
        console.out(json.dumps({"tokens": num_tokens, "instances": [asdict(hit) for hit in found]}), highlight=False)
        return
    console.print(f"a prompt of {num_tokens} tokens")
    table = columns("role", "instance", ">cached tokens", ">share", "")
    for hit in found:
        share = f"{100 * hit.cached_tokens / max(1, num_tokens):.0f} %"
        table.add_row(hit.role, hit.instance, str(hit.cached_tokens), share, hit.missing)
    console.print(table)


def _show_overview(console: Console, caches: Sequence[Cache], *, as_json: bool) -> None:
    shared = most_shared(caches)
    if as_json:
        rows = [
            {
                "role": cache.record.role,
                "instance": cache.record.instance_id,
                "blocks": len(cache.blocks),
                "page_size": cache.page_size,
                "tokens": cache.num_tokens,
                "missing": cache.missing,
            }
            for cache in caches
        ]
        console.out(json.dumps(asdict(Overview(rows, shared))), highlight=False)
        return
    table = columns("role", "instance", ">blocks", ">page size", ">tokens", ">of the pool", "")
    for cache in caches:
        pages = 0 if cache.record.kv is None else cache.record.kv.num_pages
        share = f"{100 * len(cache.blocks) / pages:.0f} %" if pages else ""
        counts = map(str, (len(cache.blocks), cache.page_size, cache.num_tokens))
        table.add_row(cache.record.role, cache.record.instance_id, *counts, share, cache.missing)
    console.print(table)
    if not shared:
        console.print("\nno block is cached on several instances")
        return
    console.print("\nmost shared prefixes, by the instances that have cached them")
    table = columns(">instances", ">blocks", ">tokens", "last block", "held by")
    for one in shared:
        counts = map(str, (len(one.instances), one.blocks, one.tokens))
        table.add_row(*counts, one.last_block, " ".join(one.instances))
    console.print(table)
