"""The mock's marks are in blocks of tokens, so that pages of another size, filled row by row, have the same marks."""

import ctypes
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from components.kv_transfer.pieces import Pieces, cut
from components.wire.sampling import SamplingParams
from engine.core.engine_core import EngineCore
from engine.ports import EngineRequest, Exposed, Phase
from tests.engine.mock_engine import make_mock
from tests.engine.tiny_engine import check_pages, greedy, prefilled, prompt, run, run_until_idle

PAIRS = [(16, 64), (64, 16), (128, 16), (32, 128), (64, 64)]
ENDLESS = greedy(30, ignore_eos=True)


def make(home: Path, page_size: int) -> EngineCore:
    return make_mock(home, page_size=page_size, num_pages=2048 // page_size)


def move(source: EngineCore, target: EngineCore, pieces: Pieces) -> None:
    here, there = source.kv_region.address, target.kv_region.address
    for start, to, length in zip(pieces.source, pieces.target, pieces.length, strict=True):
        ctypes.memmove(there + int(to), here + int(start), int(length))


def moved(
    there: EngineCore, here: EngineCore, ids: list[int], sampling: SamplingParams, num_moved: int
) -> tuple[Exposed, EngineCore]:
    """A request that waits in `here` for its first token, with the KV of `num_moved` of its tokens."""
    computed = prefilled(there, "p", ids, sampling)
    here.submit(EngineRequest("d", ids, sampling, Phase.DECODE))
    [reserved] = here.step().reserved
    layouts = there.kv_region.layout, here.kv_region.layout
    cached = reserved.num_computed
    move(there, here, cut(*layouts, range(cached, num_moved), computed.pages, reserved.pages))
    return computed, here


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
@pytest.mark.parametrize("length", [1, 16, 17, 40, 64, 128, 200])
def test_moved_rows_go_on_as_if_computed_here(tmp_path: Path, ours: int, theirs: int, length: int) -> None:
    expected = run(make(tmp_path, 16), [EngineRequest("r", prompt(length), ENDLESS)]).tokens["r"]
    computed, here = moved(make(tmp_path, ours), make(tmp_path, theirs), prompt(length), ENDLESS, length)
    assert computed.first_token is not None
    [first] = here.deliver("d", computed.first_token)
    seen = run_until_idle(here)
    assert first.token_ids + seen.tokens["d"] == expected
    check_pages(here)


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_a_last_block_that_did_not_arrive_fails_the_request(tmp_path: Path, ours: int, theirs: int) -> None:
    computed, here = moved(make(tmp_path, ours), make(tmp_path, theirs), prompt(200), ENDLESS, num_moved=192)
    here.deliver("d", computed.first_token or 0)
    assert "should contain 8 tokens" in run_until_idle(here).failed["d"].error.message


def test_a_stripe_that_did_not_arrive_fails_the_request(tmp_path: Path) -> None:
    there, here = make(tmp_path, 64), make(tmp_path, 16)
    computed = prefilled(there, "p", prompt(40), ENDLESS)
    here.submit(EngineRequest("d", prompt(40), ENDLESS, Phase.DECODE))
    [reserved] = here.step().reserved
    pieces = cut(there.kv_region.layout, here.kv_region.layout, range(40), computed.pages, reserved.pages)
    first_stripes = np.arange(len(pieces)) % here.kv_region.layout.num_stripes == 0
    halves = [array[first_stripes] for array in (pieces.source, pieces.target, pieces.length)]
    move(there, here, Pieces(*halves))
    here.deliver("d", computed.first_token or 0)
    assert "should contain 8 tokens" in run_until_idle(here).failed["d"].error.message


@pytest.mark.parametrize("page_size", [16, 64, 128])
@pytest.mark.parametrize("length", [16, 17, 33, 64, 65, 100])
def test_branches_share_pages_of_any_size(tmp_path: Path, page_size: int, length: int) -> None:
    """The page of the prompt's last token is copied, with the marks of all its blocks."""
    seen = run(make(tmp_path, page_size), [EngineRequest("r", prompt(length), replace(ENDLESS, n=3))])
    expected = run(make(tmp_path, 16), [EngineRequest("r", prompt(length), ENDLESS)]).tokens["r"]
    assert [seen.tokens["r"], seen.branches["r", 1], seen.branches["r", 2]] == [expected] * 3
