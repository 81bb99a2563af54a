"""The engine's core keeps a request's constraint, also if the request is preempted, moved or recomputed."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from llguidance import LLTokenizer

from components.errors import Rejected
from components.structured.grammar import as_lark, load_vocabulary, start_matcher
from components.structured.mask import GrammarMask
from components.wire.sampling import Constraint, SamplingParams
from engine.core.engine_core import EngineCore
from engine.model.mock_model import SPECIAL, mock_dir
from engine.ports import EngineRequest, FinishReason, Phase
from tests.engine.mock_engine import make_mock
from tests.engine.tiny_engine import check_pages, prompt, read_page, run, run_until_idle, write_page

pytestmark = pytest.mark.usefixtures("pipeline")

END = SPECIAL["<|im_end|>"]
VOCAB = 258


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> LLTokenizer:
    return load_vocabulary(mock_dir(tmp_path_factory.mktemp("m")), VOCAB, frozenset({END}))


def constraint(wanted: Any) -> Constraint:
    if isinstance(wanted, Constraint):
        return as_lark(wanted)
    if isinstance(wanted, str):
        return Constraint(kind="regex", text=wanted)
    return Constraint(kind="json_schema", text=json.dumps(wanted))


def mask(vocabulary: LLTokenizer, wanted: Any, seen: list[int] | None = None) -> GrammarMask:
    matcher = start_matcher(vocabulary, constraint(wanted))
    assert not matcher.get_error()
    made = GrammarMask(matcher, -(-VOCAB // 32))
    for token_id in seen or ():
        made.accept(token_id)
    return made


def drawn(max_tokens: int = 600, seed: int = 0, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=seed, **more)


def text_of(token_ids: list[int]) -> str:
    return bytes(t for t in token_ids if t < 256).decode()


def roomy(home: Path, **more: Any) -> EngineCore:
    return make_mock(home, num_pages=260, **more)


def whole(wanted: Any, text: str) -> bool:
    """Whether `text` satisfies the constraint, without the grammar."""
    if isinstance(wanted, str):
        return re.fullmatch(wanted, text) is not None
    return not list(Draft202012Validator(wanted).iter_errors(json.loads(text)))


SHORT: list[Any] = [
    r"[a-c]{3}-\d{2}",
    r"(yes|no|maybe)",
    r"(\+49)?[0-9]{5,7}",
    "é{2}(ü|日本)",
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}, "required": ["a", "b"]},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    {"type": "object"},
]


@pytest.mark.parametrize("wanted", SHORT, ids=str)
@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 0},
        {"n": 4},
        {"ignore_eos": True},
        {"logprobs": 2},
        {"min_tokens": 20},
    ],
    ids=str,
)
def test_however_it_is_drawn_the_text_is_what_was_asked_for(
    tmp_path: Path, vocabulary: LLTokenizer, wanted: Any, how: dict[str, Any]
) -> None:
    engine = roomy(tmp_path)
    params = SamplingParams(**{"max_tokens": 900, "temperature": 1.0, "seed": 5, **how})
    seen = run(engine, [EngineRequest("r", prompt(20), params, mask=mask(vocabulary, wanted))])
    texts = [seen.tokens["r"], *seen.branches.values()]
    finishes = [seen.finish["r"], *seen.branch_finish.values()]
    assert len(texts) == params.n
    for tokens, finish in zip(texts, finishes, strict=True):
        assert finish is FinishReason.STOP
        assert whole(wanted, text_of(tokens)), text_of(tokens)
    assert params.n == 1 or len({tuple(tokens) for tokens in texts}) > 1, "branches differ"


def test_the_end_comes_only_where_the_text_is_whole_and_not_while_eos_is_ignored(
    tmp_path: Path, vocabulary: LLTokenizer
) -> None:
    def made(params: SamplingParams) -> list[int]:
        return run(
            make_mock(tmp_path, {"answer_tokens": 1}),
            [EngineRequest("r", prompt(9), params, mask=mask(vocabulary, "ab{2,9}"))],
        ).tokens["r"]

    assert made(drawn()) == [*b"abb", END]  # it ends as soon as it may
    assert made(drawn(min_tokens=6)) == [*b"abbbbb", END]
    assert made(drawn(ignore_eos=True)) == [*b"abbbbbbbbb"]
    assert made(drawn(min_tokens=30)) == [*b"abbbbbbbbb"]  # nothing more can come


def test_an_answer_that_ends_for_length_is_a_beginning(tmp_path: Path, vocabulary: LLTokenizer) -> None:
    seen = run(make_mock(tmp_path), [EngineRequest("r", prompt(9), drawn(6), mask=mask(vocabulary, "(abc){4}"))])
    assert text_of(seen.tokens["r"]) == "abcabc"
    assert seen.finish["r"] is FinishReason.LENGTH


def test_preemption_changes_nothing(tmp_path: Path, vocabulary: LLTokenizer) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 15, "maxItems": 20}

    def requests() -> list[EngineRequest]:
        return [
            EngineRequest(f"r{i}", prompt(33, start=i), drawn(seed=i), mask=mask(vocabulary, schema)) for i in range(6)
        ]

    tight = run(make_mock(tmp_path, num_pages=24, reserve_tokens=0), requests())
    assert tight.steps[-1].preemptions > 0
    assert tight.tokens == run(roomy(tmp_path), requests()).tokens
    assert all(whole(schema, text_of(tokens)) for tokens in tight.tokens.values())


@pytest.mark.parametrize("moved_after", [1, 7, 30])
def test_a_text_goes_on_elsewhere_with_a_mask_that_has_seen_its_tokens(
    tmp_path: Path, vocabulary: LLTokenizer, moved_after: int
) -> None:
    schema = {"type": "array", "items": {"type": "string"}, "minItems": 5, "maxItems": 9}
    expected = run(roomy(tmp_path), [EngineRequest("r", prompt(9), drawn(), mask=mask(vocabulary, schema))]).tokens["r"]
    seen, left = expected[:moved_after], expected[moved_after:]
    rest = EngineRequest(
        "r", prompt(9) + seen, drawn(600 - moved_after), num_generated=moved_after, mask=mask(vocabulary, schema, seen)
    )
    assert run(roomy(tmp_path), [rest]).tokens["r"] == left


@pytest.mark.parametrize("n", [1, 3])
def test_prefill_draws_the_first_token_by_the_mask_and_decode_s_takes_it(
    tmp_path: Path, vocabulary: LLTokenizer, n: int
) -> None:
    wanted = r"[xyz]\d{3}[xyz]"
    params = drawn(n=n)
    prefill, decode = make_mock(tmp_path), make_mock(tmp_path)
    request = EngineRequest("r", prompt(40), params, Phase.PREFILL, mask=mask(vocabulary, wanted))
    computed = run(prefill, [request]).computed["r"][-1]
    assert computed.first_token is not None
    assert computed.first_token in b"xyz"
    decode.submit(EngineRequest("r", prompt(40), params, Phase.DECODE, mask=mask(vocabulary, wanted)))
    reserved = decode.step().reserved[0]
    for source, target in zip(computed.pages, reserved.pages, strict=True):
        write_page(decode, target, read_page(prefill, source))
    (first,) = decode.deliver("r", computed.first_token)
    seen = run_until_idle(decode)
    texts = [[*first.token_ids, *seen.tokens["r"]], *seen.branches.values()]
    together = run(make_mock(tmp_path), [EngineRequest("r", prompt(40), params, mask=mask(vocabulary, wanted))])
    assert texts == [together.tokens["r"], *together.branches.values()]
    assert all(whole(wanted, text_of(tokens)) for tokens in texts)


def test_a_transfer_that_fails_leaves_the_mask_where_it_was(tmp_path: Path, vocabulary: LLTokenizer) -> None:
    decode = make_mock(tmp_path)
    decode.submit(EngineRequest("r", prompt(40), drawn(), Phase.DECODE, mask=mask(vocabulary, "[ab]{4}")))
    decode.step()
    decode.recompute("r")
    assert whole("[ab]{4}", text_of(run_until_idle(decode).tokens["r"]))
    decode.release("r")
    check_pages(decode)


@pytest.mark.parametrize("n", [1, 2])
def test_a_first_token_that_the_mask_refuses_is_refused_and_the_prompt_may_be_recomputed(
    tmp_path: Path, vocabulary: LLTokenizer, n: int
) -> None:
    """If mask compilers differed, or prefill had none, the text ended there as if complete."""
    decode = make_mock(tmp_path)
    decode.submit(EngineRequest("r", prompt(40), drawn(n=n), Phase.DECODE, mask=mask(vocabulary, "[ab]{4}")))
    decode.step()
    with pytest.raises(Rejected, match="constraint"):
        decode.deliver("r", ord("z"))
    decode.recompute("r")
    seen = run_until_idle(decode)
    assert all(whole("[ab]{4}", text_of(tokens)) for tokens in [seen.tokens["r"], *seen.branches.values()])
    decode.release("r")
    check_pages(decode)


def test_a_first_token_that_nobody_wants_need_not_be_allowed(tmp_path: Path, vocabulary: LLTokenizer) -> None:
    prefill, decode = make_mock(tmp_path), make_mock(tmp_path)
    params = drawn(n=2)
    computed = run(prefill, [EngineRequest("r", prompt(40), params, Phase.PREFILL)]).computed["r"][-1]
    decode.submit(EngineRequest("r", prompt(40), params, Phase.DECODE, mask=mask(vocabulary, "[ab]{4}")))
    for source, target in zip(computed.pages, decode.step().reserved[0].pages, strict=True):
        write_page(decode, target, read_page(prefill, source))
    decode.cancel("r", 0)
    assert decode.deliver("r", ord("z")) == []
    (tokens,) = run_until_idle(decode).branches.values()
    assert whole("[ab]{4}", text_of(tokens))


def test_a_text_that_went_off_its_grammar_fails_instead_of_ending_as_if_it_were_whole(
    tmp_path: Path, vocabulary: LLTokenizer
) -> None:
    """The first token is from a peer without the mask, or the mask exceeds its limit."""
    decode = make_mock(tmp_path)
    decode.submit(EngineRequest("r", prompt(40), drawn(), Phase.DECODE, mask=mask(vocabulary, "[ab]{4}")))
    decode.step()
    decode.recompute("r")
    decode.submit(EngineRequest("other", prompt(30), drawn(), mask=mask(vocabulary, "[ab]{4}")))
    broken = mask(vocabulary, "[ab]{4}", [*b"az"])
    assert broken.fault is not None
    seen = run(decode, [EngineRequest("broken", prompt(20), drawn(n=2), mask=broken)])
    assert seen.failed.keys() == {"broken"}
    assert "constraint" in seen.failed["broken"].error.message
    assert whole("[ab]{4}", text_of(seen.tokens["other"]))
    decode.release("r")
    check_pages(decode)
