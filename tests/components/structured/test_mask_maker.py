"""A worker's masks: compiled once, off the event loop, one for each request."""

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits
from prometheus_client import CollectorRegistry

from components.errors import Overloaded, Rejected
from components.structured import grammar
from components.structured import mask_maker as module
from components.structured.grammar import load_vocabulary, start_matcher
from components.structured.mask import GrammarMask
from components.structured.mask_maker import MaskMaker, open_masks
from components.structured.metrics import ConstraintMetrics
from components.wire.sampling import Constraint
from engine.model.mock_model import SPECIAL

pytestmark = pytest.mark.anyio
END = SPECIAL["<|im_end|>"]
VOCAB = 258


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
async def maker(folder: Path, registry: CollectorRegistry) -> AsyncIterator[MaskMaker]:
    async with open_masks(lambda: folder, VOCAB, frozenset({END}), ConstraintMetrics(registry)) as opened:
        yield opened


def pattern(regex: str) -> Constraint:
    return Constraint(kind="regex", text=regex)


def allowed(mask: GrammarMask | None, vocab: int = VOCAB) -> set[int]:
    assert mask is not None
    words = np.full(-(-vocab // 32), -1, dtype=np.int32)
    mask.fill(words)
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


async def test_each_request_has_a_mask_of_its_own_from_one_compilation(
    maker: MaskMaker, registry: CollectorRegistry
) -> None:
    first, second = await asyncio.gather(*(maker.mask_of(pattern("ab|ac"), [1]) for _ in range(2)))
    third = await maker.mask_of(pattern("ab|ac"), [1])
    assert first is not None
    first.accept(ord("a"))
    fork = first.fork()
    first.accept(ord("b"))
    assert allowed(first) == {END}
    assert allowed(fork) == {ord("b"), ord("c")}
    assert allowed(second) == allowed(third) == {ord("a")}
    assert (first.is_complete, fork.is_complete, first.fault) == (True, False, None)
    counted = {
        result: registry.get_sample_value("kvmesh_structured_output_requests_total", {"result": result})
        for result in ("compiled", "cached")
    }
    assert counted == {"compiled": 1, "cached": 1}


async def test_the_mask_of_a_stream_that_moved_has_seen_its_tokens(maker: MaskMaker) -> None:
    mask = await maker.mask_of(pattern("a{2}[bc]"), [7, 7, *b"aa"], 2)
    assert allowed(mask) == {ord("b"), ord("c")}


@pytest.mark.parametrize(
    ("regex", "first"),
    [(r"\d", set(range(48, 58))), ("/", {47}), ("\n", {10}), ('"', {34}), (r"\/", {47}), (r"[/\]]", {47, 93})],
)
async def test_a_regex_is_what_it_says_whatever_stands_in_it(maker: MaskMaker, regex: str, first: set[int]) -> None:
    assert allowed(await maker.mask_of(pattern(regex), [1])) == first


async def test_what_the_frontend_should_have_refused_is_refused(maker: MaskMaker) -> None:
    for wrong in (pattern("("), Constraint(kind="json_schema", text="{")):
        with pytest.raises(Rejected, match="constraint cannot be used"):
            await maker.mask_of(wrong, [1])


async def test_a_model_without_tokenizer_refuses_requests_that_need_one(tmp_path: Path) -> None:
    async with open_masks(lambda: tmp_path, VOCAB, frozenset(), ConstraintMetrics(CollectorRegistry())) as maker:
        with pytest.raises(Rejected, match="tokenizer"):
            await maker.mask_of(pattern("a"), [1])


async def test_only_so_many_are_kept(maker: MaskMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_KNOWN", 2)
    for regex in ("a", "b", "a", "c", "a"):
        await maker.mask_of(pattern(regex), [1])
    assert [constraint.text for constraint in maker._known] == ["c", "a"]


@pytest.mark.parametrize("grows", ["when it is compiled", "with the texts"])
async def test_what_is_kept_is_bounded_by_what_it_takes(
    maker: MaskMaker, monkeypatch: pytest.MonkeyPatch, grows: str
) -> None:
    """Characters were counted, but three may take as much memory as ten thousand."""
    monkeypatch.setattr(module, "MAX_KNOWN_BYTES", 10_000)
    monkeypatch.setattr(module, "BYTES_PER_TOKEN", 1000)
    monkeypatch.setattr(module, "BYTES_PER_CPU_S", 0)
    masks = [await maker.mask_of(pattern(f"{name}*"), [1]) for name in "abc"]
    assert [constraint.text for constraint in maker._known] == ["a*", "b*", "c*"]
    if grows == "with the texts":
        assert masks[1] is not None
        for _ in range(11):
            masks[1].fork().accept(ord("b"))
        await maker.mask_of(pattern("c*"), [1])
    else:
        monkeypatch.setattr(module, "BYTES_PER_CPU_S", 1e12)
        await maker.mask_of(pattern("d*"), [1])
    kept = {"with the texts": ["c*"], "when it is compiled": []}[grows]
    assert [constraint.text for constraint in maker._known] == kept
    assert allowed(masks[1]) == {ord("b"), END}, "who has a mask keeps it"


async def test_a_compilation_filled_by_texts_serves_no_other_request(
    maker: MaskMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All masks of a constraint share one compilation: after a text that exceeded its limit, each failed at once."""
    monkeypatch.setattr(grammar, "LIMITS", LLParserLimits(max_lexer_states=100, verbose_errors=False))
    counting = pattern("[a-z]{0,300}!")
    filling = await maker.mask_of(counting, [1])
    assert filling is not None
    for _ in range(300):
        filling.fill(np.zeros(-(-VOCAB // 32), dtype=np.int32))
        filling.accept(ord("x"))
    assert filling.fault is not None
    after = await maker.mask_of(counting, [1])
    assert after is not None
    assert ord("x") in allowed(after)
    after.accept(ord("x"))
    assert after.fault is None


async def test_a_query_of_allowed_tokens_changes_no_state(maker: MaskMaker) -> None:
    """Speculative decoding asks about tokens of which some are forbidden."""
    constraint = Constraint(kind="regex", text="abc")
    mask = await maker.mask_of(constraint, [])
    assert [mask.allows(list(text)) for text in (b"", b"abc", b"abx", b"x", b"abcd")] == [0, 3, 2, 0, 3]
    mask.accept(ord("a"))
    assert (mask.allows(list(b"bcd")), mask.fault, mask.is_complete) == (2, None, False)
    again = await maker.mask_of(constraint, [])
    assert again._wear is mask._wear, "it was compiled again"


async def test_a_constraint_is_compiled_anew_after_so_many_tokens(
    maker: MaskMaker, registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_TOKENS", 5)
    for _ in range(4):
        await maker.mask_of(pattern("a*"), [7, *b"aaa"], 3)
    results = "kvmesh_structured_output_requests_total"
    assert registry.get_sample_value(results, {"result": "compiled"}) == 2
    assert registry.get_sample_value(results, {"result": "cached"}) == 2


async def test_leaving_ends_the_threads(folder: Path) -> None:
    """They continued, and the end of the process waited for their compilations."""
    before = set(threading.enumerate())
    async with open_masks(lambda: folder, VOCAB, frozenset({END}), ConstraintMetrics(CollectorRegistry())) as maker:
        await maker.mask_of(pattern("a"), [1])
        assert {thread.name for thread in set(threading.enumerate()) - before} >= {"constraint"}
    assert "constraint" not in {thread.name for thread in set(threading.enumerate()) - before}
    with pytest.raises(Overloaded):
        await maker.mask_of(pattern("b"), [1])


LEAVES_IN_THE_MIDDLE = """
import asyncio, sys, uvloop
from pathlib import Path
from prometheus_client import CollectorRegistry
from components.structured import mask_maker
from components.structured.metrics import ConstraintMetrics
from components.wire.sampling import Constraint

async def main():
    mask_maker.STOP_S = 0.1
    bomb = Constraint(kind="json_schema", text='{"type": "integer", "multipleOf": 9999991}')
    metrics = ConstraintMetrics(CollectorRegistry())
    async with mask_maker.open_masks(lambda: Path(sys.argv[1]), 258, frozenset(), metrics) as maker:
        asking = [asyncio.create_task(maker.mask_of(bomb, [1])) for _ in range(2)]
        while not any("start_matcher" in str(frame) for frame in frames()):
            await asyncio.sleep(0.01)
    print("left", *(task.cancelled() for task in asking))

def frames():
    for frame in sys._current_frames().values():
        while frame is not None:
            yield frame.f_code
            frame = frame.f_back

uvloop.run(main())
"""


def test_the_end_of_a_process_does_not_wait_for_what_is_being_compiled(folder: Path) -> None:
    """The compilation takes many minutes, and cannot be interrupted."""
    command = [sys.executable, "-c", LEAVES_IN_THE_MIDDLE, str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "left True True\n", "")


@pytest.mark.parametrize("vocab", [VOCAB, 300, 1000])
async def test_ids_without_a_token_never_come(folder: Path, vocab: int) -> None:
    """Models often have more logits than tokens."""
    async with open_masks(lambda: folder, vocab, frozenset({END}), ConstraintMetrics(CollectorRegistry())) as maker:
        mask = await maker.mask_of(pattern("(?s:.*)"), [1])
    assert max(allowed(mask, vocab)) == END


async def test_a_tokenizer_may_have_more_tokens_than_the_model(folder: Path) -> None:
    async with open_masks(lambda: folder, 200, frozenset(), ConstraintMetrics(CollectorRegistry())) as maker:
        assert allowed(await maker.mask_of(pattern("[a-c]"), [1]), 200) == {*b"abc"}


def test_a_mask_allows_what_the_grammar_takes_and_nothing_else(real_model_dir: Path) -> None:
    """With the default model's vocabulary."""
    vocabulary = load_vocabulary(real_model_dir, 49_152, frozenset({2}))
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 5}}, "required": ["name"]}
    matcher = start_matcher(vocabulary, Constraint(kind="json_schema", text=json.dumps(schema)))
    mask = GrammarMask(matcher, 49_152 // 32)
    chance = np.random.default_rng(0)
    for token_id in vocabulary.tokenize_str('{"name": "Ada'):
        can = allowed(mask, 49_152)
        assert token_id in can
        others = sorted({*range(49_152)} - can)
        for tried in [*chance.choice(sorted(can), 20), *chance.choice(others, 20)]:
            assert _takes(matcher, int(tried)) is (int(tried) in can)
        mask.accept(token_id)
    assert mask.fault is None


def _takes(matcher: LLMatcher, token_id: int) -> bool:
    return matcher.deep_copy().consume_token(token_id)
