"""The mock on several ranks: each has marks of its heads, and the followers are processes without torch."""

import asyncio
import ctypes
import os
import signal
from pathlib import Path
from typing import Final

import pytest

from components.kv_transfer.pieces import cut
from components.startup import WrongSettings
from components.wire.layout import KvRegion, of_shard
from engine.config import FOLLOWER, EngineConfig, MockConfig
from engine.core.engine_core import EngineCore
from engine.mock.mock_engine import build_engine
from engine.parallel.rank_processes import RankLost
from engine.ports import EngineRequest, Phase
from engine.start import run_engine
from tests.engine.mock_engine import make_mock
from tests.engine.tiny_engine import check_pages, greedy, prefilled, prompt, run, run_until_idle
from tests.waiting import PATIENCE_S, until

ENDLESS: Final = greedy(40, ignore_eos=True)
SIZES: Final = [((1, 2), 2), ((2, 1), 4), ((2, 4), 4), ((4, 2), 2), ((4, 4), 2), ((1, 2), 3), ((2, 1), 3), ((2, 3), 5)]


def on(home: Path, ranks: int, kv_heads: int, page_size: int = 16) -> EngineCore:
    """All ranks in this process."""
    return make_mock(home, {"kv_heads": kv_heads, "layers": 2}, tensor_parallel=ranks, page_size=page_size)


def pools(region: KvRegion) -> list[int]:
    return [region.address, *(rank.address for rank in region.followers)]


def move(
    source: KvRegion, target: KvRegion, tables: tuple[list[int], list[int]], tokens: range, lost: int = -1
) -> None:
    """Copy like the ranks write. Nothing arrives at rank `lost` of the target."""
    for i, here in enumerate(pools(source)):
        for j, there in enumerate(pools(target)):
            layouts = of_shard(source.layout, i, source.layout.shards), of_shard(target.layout, j, target.layout.shards)
            pieces = cut(*layouts, tokens, *tables)
            for start, to, length in zip(pieces.source, pieces.target, pieces.length, strict=True):
                if j != lost:
                    ctypes.memmove(there + int(to), here + int(start), int(length))


@pytest.mark.parametrize("lost", [False, True], ids=["all", "one rank's are lost"])
@pytest.mark.parametrize("page_size", [16, 32])
@pytest.mark.parametrize(("ranks", "kv_heads"), SIZES, ids=str)
def test_a_moved_prompt_is_continued_only_if_all_ranks_have_it(
    tmp_path: Path, ranks: tuple[int, int], kv_heads: int, page_size: int, lost: bool
) -> None:
    ids = prompt(40)
    there, here = on(tmp_path, ranks[0], kv_heads), on(tmp_path, ranks[1], kv_heads, page_size)
    computed = prefilled(there, "p", ids, ENDLESS)
    here.submit(EngineRequest("d", ids, ENDLESS, Phase.DECODE))
    [reserved] = here.step().reserved
    tables = list(computed.pages), list(reserved.pages)
    move(there.kv_region, here.kv_region, tables, range(40), lost=ranks[1] - 1 if lost else -1)
    assert computed.first_token is not None
    [first] = here.deliver("d", computed.first_token)
    seen = run_until_idle(here)
    if lost:
        assert "should contain 8 tokens" in seen.failed["d"].error.message
    else:
        expected = run(make_mock(tmp_path), [EngineRequest("r", ids, ENDLESS)]).tokens["r"]
        assert first.token_ids + seen.tokens["d"] == expected
    check_pages(here)


@pytest.mark.parametrize("number", range(4), ids=["first", "inner", "another inner", "last"])
def test_one_wrong_mark_of_any_head_is_noticed(tmp_path: Path, number: int) -> None:
    """One of the four marks of two heads; the inner ones are not rewritten with each token."""
    engine = on(tmp_path, 2, 2)
    engine.submit(EngineRequest("r", prompt(20), ENDLESS))
    while engine.step().tokens == []:
        pass
    [request] = engine._requests
    region, size = engine.kv_region, engine.kv_region.layout.page_bytes
    half = size - region.layout.page_size * region.layout.row_bytes  # of a rank's only head: its last stripe
    place = pools(region)[number // 2] + request.pages[1] * size + (half if number % 2 else 0)
    ctypes.c_ubyte.from_address(place + 4).value ^= 1
    assert "should contain" in run_until_idle(engine).failed["r"].error.message


def test_ranks_that_the_heads_do_not_allow_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        WrongSettings, match=r"tensor_parallel=4: mock has 9 query heads and 3 KV heads; .* into 1, 2, 3, 9"
    ):
        build_engine("mock", EngineConfig(num_pages=8, tensor_parallel=4), tmp_path)


def test_followers_have_the_leader_s_pages_and_end_with_it_or_end_it(tmp_path: Path) -> None:
    config = EngineConfig(num_pages=64, tensor_parallel=2, mock=MockConfig(speedup=float("inf"), kv_heads=2))

    async def main() -> None:
        def build() -> EngineCore:
            return build_engine("mock", config, tmp_path, follower=FOLLOWER)

        expected = run(make_mock(tmp_path), [EngineRequest("r", prompt(40), ENDLESS)]).tokens["r"]
        async with run_engine(build, thread=False) as loop:
            [follower] = loop.engine.kv_region.followers
            maps = Path(f"/proc/{follower.pid}/maps").read_text()
            assert f"{follower.address:x}-" in maps
            assert "torch" not in maps
            tokens: list[int] = []
            loop.on_output(lambda output: tokens.extend(i for one in output.tokens for i in one.token_ids))
            await loop.between_steps(lambda engine: engine.submit(EngineRequest("r", prompt(40), ENDLESS)))
            await until(lambda: len(tokens) == ENDLESS.max_tokens)
            assert tokens == expected
        assert not Path(f"/proc/{follower.pid}").exists()
        async with run_engine(build, thread=False) as loop:
            [follower] = loop.engine.kv_region.followers
            os.kill(follower.pid, signal.SIGKILL)
            error = await asyncio.wait_for(loop.failed(), PATIENCE_S)
            assert isinstance(error, RankLost)
            assert f"rank 1, process {follower.pid}: it ended with -9" in error.message

    asyncio.run(main())
