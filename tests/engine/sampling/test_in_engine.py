"""Sampling inside whole engines: the batch, preemption, moves, and the phases of a request change nothing."""

import random
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from components.wire.sampling import SamplingParams
from engine.attention.backend import Scoring
from engine.core.engine_core import EngineCore
from engine.model.load import LoadedModel
from engine.ports import EngineRequest, Phase, TokenMask
from engine.sampling.adjust import seen_by
from tests.engine.sampling.reference import make_row, sample
from tests.engine.tiny_engine import (
    EOS,
    VOCAB,
    alone,
    greedy,
    make_engine,
    prefilled,
    prompt,
    read_page,
    run,
    write_page,
)

pytestmark = pytest.mark.usefixtures("pipeline")

VARIED: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.5, "top_k": 5},
    {"temperature": 1.2, "min_p": 0.1},
    {"temperature": 0, "presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"temperature": 1.0, "repetition_penalty": 1.3, "top_k": 30, "top_p": 0.95},
    {"temperature": 0, "logit_bias": ((9, 5.0), (11, -100.0)), "logprobs": 3},
    {"temperature": 1.0, "min_tokens": 12, "stop_token_ids": tuple(range(40, 80))},
]


class Cycle:
    """Allows the tokens of a list in turn, repeatedly; counts the accepted tokens."""

    is_complete = False
    fault: str | None = None

    def __init__(self, tokens: list[int], done: list[int] | None = None) -> None:
        self.tokens = tokens
        self.accepted = list(done or ())

    def fill(self, allowed: npt.NDArray[np.int32]) -> None:
        assert allowed.shape == (-(-VOCAB // 32),)
        token = self.tokens[len(self.accepted) % len(self.tokens)]
        allowed[:] = 0
        allowed.view(np.uint32)[token // 32] = 1 << token % 32

    def accept(self, token_id: int) -> None:
        self.accepted.append(token_id)

    def allows(self, token_ids: Sequence[int]) -> int:
        done = len(self.accepted)
        right = (token == self.tokens[(done + i) % len(self.tokens)] for i, token in enumerate(token_ids))
        return sum(1 for _ in takewhile(bool, right))

    def fork(self) -> "Cycle":
        return Cycle(self.tokens, self.accepted)


class Nothing(Cycle):
    def fill(self, allowed: npt.NDArray[np.int32]) -> None:
        allowed[:] = 0


def others(count: int) -> list[EngineRequest]:
    chance = random.Random(4)
    return [
        EngineRequest(
            f"o{i}",
            prompt(chance.randrange(1, 60), start=i),
            SamplingParams(**{"max_tokens": chance.randrange(12, 30), "seed": i, **VARIED[i % len(VARIED)]}),
            mask=Cycle([7, 8, 30 + i]) if i % 7 == 3 else None,
        )
        for i in range(count)
    ]


def varied(how: int, **changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 20, "seed": 11, "ignore_eos": True, **VARIED[how], **changes})


def test_requests_of_every_kind_give_the_same_alone_and_among_31_others(tiny: LoadedModel) -> None:
    mine = [EngineRequest(f"r{how}", prompt(21), varied(how, logprobs=2)) for how in range(len(VARIED))]
    engine = make_engine(tiny, max_running=32, num_pages=256, max_step_tokens=100)
    crowd = run(engine, [*others(12), *mine, *others(32 - len(mine))[12:]])
    assert max(stats.num_running for stats in crowd.steps) > 25
    for request in mine:
        single = run(make_engine(tiny), [request])
        name = request.request_id
        assert crowd.tokens[name] == single.tokens[name]
        for told, right in zip(crowd.logprobs[name], single.logprobs[name], strict=True):
            assert [token for token, _ in told.top] == [token for token, _ in right.top]
            assert told.logprob == pytest.approx(right.logprob, abs=1e-4)


def test_a_pool_too_small_and_small_chunks_change_nothing(tiny: LoadedModel) -> None:
    asked = [EngineRequest(f"r{how}", prompt(30, start=how), varied(how)) for how in range(len(VARIED))]
    seen = run(make_engine(tiny, num_pages=12, max_running=5, max_step_tokens=11, reserve_tokens=0), asked)
    assert seen.steps[-1].preemptions > 0
    for how, request in enumerate(asked):
        assert seen.tokens[request.request_id] == alone(tiny, prompt(30, start=how), varied(how))


@pytest.mark.parametrize("how", range(len(VARIED)))
def test_a_stream_that_moves_goes_on_with_the_same_tokens(tiny: LoadedModel, how: int) -> None:
    """Penalties and min_tokens distinguish the prompt from earlier output."""
    tokens = alone(tiny, prompt(21), varied(how))
    engine = make_engine(tiny)
    for made in {1, 7, len(tokens) - 1}:
        rest = varied(how, max_tokens=20 - made)
        engine.submit(EngineRequest(f"r{made}", [*prompt(21), *tokens[:made]], rest, num_generated=made))
    seen = run(engine, [])
    assert all(seen.tokens[f"r{made}"] == tokens[made:] for made in (1, 7, len(tokens) - 1))


@pytest.mark.parametrize("lost", [False, True])
def test_prefill_and_decode_apart_give_the_same_tokens(tiny: LoadedModel, lost: bool) -> None:
    prefill, decode = make_engine(tiny), make_engine(tiny)
    for how in range(len(VARIED)):
        name, params = f"r{how}", varied(how, logprobs=1)
        computed = prefilled(prefill, name, prompt(37, start=how), params)
        prefill.release(name)
        assert computed.first_token is not None
        decode.submit(EngineRequest(name, prompt(37, start=how), params, Phase.DECODE))
        reserved = decode.step().reserved[0]
        first: list[int] = []
        if lost:
            decode.recompute(name)
            decode.release(name)
        else:
            for source, target in zip(computed.pages, reserved.pages, strict=True):
                write_page(decode, target, read_page(prefill, source))
            (output,) = decode.deliver(name, computed.first_token, computed.logprobs)
            assert output.logprobs == [computed.logprobs]
            first = output.token_ids
        assert first + run(decode, []).tokens.get(name, []) == alone(tiny, prompt(37, start=how), params)


def test_no_end_comes_before_min_tokens(tiny: LoadedModel) -> None:
    """A bias makes the end of the text and a stop token the most probable tokens."""
    ends = {"logit_bias": ((EOS, 90.0), (9, 100.0)), "stop_token_ids": (9,)}
    for temperature in (0.0, 1.0):
        for wanted in (0, 1, 2, 17):
            params = SamplingParams(max_tokens=40, temperature=temperature, min_tokens=wanted, **ends)
            tokens = alone(tiny, prompt(20), params)
            assert len(tokens) == wanted + 1
            assert tokens[-1] == 9
            assert not {EOS, 9} & set(tokens[:-1])
    params = SamplingParams(max_tokens=6, temperature=0, min_tokens=3, ignore_eos=True, **ends)
    assert alone(tiny, prompt(20), params) == [EOS, EOS, EOS, 9], "an end that is ignored is a token as any other"


def test_penalties_of_prompt_and_answer(tiny: LoadedModel) -> None:
    text = prompt(12)
    plain = alone(tiny, text, greedy(30, ignore_eos=True))
    never_twice = alone(tiny, text, greedy(30, ignore_eos=True, presence_penalty=2, logit_bias=((20, 100.0),)))
    assert never_twice[0] == 20
    assert len(set(plain)) < 30
    # logits span less than 40: at such weights a token repeats only after all others
    dense = [(token, 1.0) for token in range(VOCAB)]
    spread = greedy(60, ignore_eos=True, frequency_penalty=2, presence_penalty=2, logit_bias=tuple(dense))
    counts = np.bincount(alone(tiny, text, spread), minlength=VOCAB)
    assert counts.max() < np.bincount(alone(tiny, text, greedy(60, ignore_eos=True)), minlength=VOCAB).max()
    # presence and frequency look at the answer alone, repetition at the prompt too
    row = make_row(text, presence_penalty=2.0, frequency_penalty=2.0)
    logits = torch.zeros(1, VOCAB)
    logits[0, text[3]] = 0.5
    assert sample(logits.clone(), [make_row(text, temperature=0.0, presence_penalty=2.0)]) == [text[3]]
    assert seen_by(row).ids.tolist() == []
    repeated = make_row(text, temperature=0.0, repetition_penalty=2.0)
    logits[0, 0] = 0.3
    assert 0 not in text
    assert sample(logits.clone(), [repeated]) == [0]


def test_a_mask_decides_and_is_told(tiny: LoadedModel) -> None:
    wanted = [9, 40, 127, 0, 31, 32]
    for params in (greedy(20, ignore_eos=True), SamplingParams(max_tokens=20, seed=3, ignore_eos=True, top_k=3)):
        mask = Cycle(wanted)
        seen = run(make_engine(tiny), [*others(5), EngineRequest("r", prompt(30), params, mask=mask)])
        assert seen.tokens["r"] == (wanted * 4)[:20]
        assert mask.accepted == seen.tokens["r"]


def test_a_mask_is_told_the_first_token_of_another_process(tiny: LoadedModel) -> None:
    wanted = [9, 40, 127]
    prefill, decode = make_engine(tiny), make_engine(tiny)
    request = EngineRequest("r", prompt(20), greedy(6), Phase.PREFILL, mask=Cycle(wanted))
    computed = run(prefill, [request]).computed["r"][-1]
    assert computed.first_token == 9
    decode.submit(EngineRequest("r", prompt(20), greedy(6), Phase.DECODE, mask=Cycle(wanted)))
    decode.step()
    decode.deliver("r", 9)
    assert run(decode, []).tokens["r"] == [40, 127, 9, 40, 127]


def test_a_mask_holds_back_its_end_until_min_tokens_unless_it_leaves_nothing_else(tiny: LoadedModel) -> None:
    class Either(Cycle):
        def fill(self, allowed: npt.NDArray[np.int32]) -> None:
            allowed[:] = 0
            allowed[EOS // 32] = 1 << EOS
            if len(self.accepted) < 4:
                allowed[1] = 1

    params = greedy(20, min_tokens=10, logit_bias=((EOS, 100.0),))
    seen = run(make_engine(tiny), [EngineRequest("r", prompt(9), params, mask=Either([]))])
    assert seen.tokens["r"] == [32, 32, 32, 32, EOS]


@pytest.mark.parametrize("params", [greedy(9), SamplingParams(max_tokens=9, temperature=1.0, min_tokens=3)])
def test_a_mask_that_allows_nothing_ends_the_text(tiny: LoadedModel, params: SamplingParams) -> None:
    seen = run(make_engine(tiny), [EngineRequest("r", prompt(9), params, mask=Nothing([]))])
    assert seen.tokens["r"] == [EOS]


def test_a_mask_without_an_end_to_fall_back_on_still_gives_tokens() -> None:
    mask: TokenMask = Nothing([])
    logits = torch.randn(1, VOCAB)
    assert sample(logits.clone(), [make_row([1], temperature=0.0, mask=mask)]) == [int(logits.argmax())]


def log_softmax_of(tiny: LoadedModel, token_ids: list[int]) -> list[list[float]]:
    """Return transformers' log-probabilities of every position except the last."""
    step = _Causal()
    with torch.inference_mode():
        output = tiny.module(
            input_ids=torch.tensor([token_ids], device=tiny.device),
            position_ids=torch.arange(len(token_ids), device=tiny.device).unsqueeze(0),
            use_cache=False,
            step_attention=step,
        )
    return output.logits[0].log_softmax(-1).tolist()


class _Causal:
    """Attention over the tokens given, without pages."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, *, sinks: Tensor | None = None
    ) -> Tensor:
        del layer
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scoring.scaling, enable_gqa=True
        )
        return out.transpose(1, 2)


@pytest.mark.parametrize("length", [1, 16, 90])
@pytest.mark.parametrize(
    "how", [greedy(8, ignore_eos=True), SamplingParams(max_tokens=8, seed=2, ignore_eos=True, top_k=4)]
)
def test_logprobs_are_those_of_the_model(tiny: LoadedModel, length: int, how: SamplingParams) -> None:
    """Also in chunks, with prefix hits, and beside others."""
    engine = make_engine(tiny)
    run(engine, [EngineRequest("warm", prompt(length), greedy(1))])
    params = SamplingParams(
        max_tokens=8,
        temperature=how.temperature,
        seed=2,
        ignore_eos=True,
        top_k=how.top_k,
        logprobs=4,
        prompt_logprobs=3,
    )
    seen = run(engine, [*others(4), EngineRequest("r", prompt(length), params), *others(9)[4:]])
    assert seen.cached["r"] == 0
    text = [*prompt(length), *seen.tokens["r"]]
    right = log_softmax_of(tiny, text)
    told = [*seen.prompt_logprobs["r"], *seen.logprobs["r"]]
    assert len(told) == len(text) - 1
    assert len(seen.logprobs["r"]) == 8
    for at, entry in enumerate(told):
        assert entry.logprob == pytest.approx(right[at][text[at + 1]], abs=2e-4)
        assert len(entry.top) == (3 if at < length - 1 else 4)
        assert [p for _, p in entry.top] == pytest.approx(sorted(right[at], reverse=True)[: len(entry.top)], abs=2e-4)
        for token, logprob in entry.top:
            assert logprob == pytest.approx(right[at][token], abs=2e-4)


def test_logprobs_of_a_prompt_survive_a_preemption_and_come_once(tiny: LoadedModel) -> None:
    params = greedy(40, ignore_eos=True, prompt_logprobs=1)
    asked = [EngineRequest(f"r{i}", prompt(30, start=i), params) for i in range(5)]
    seen = run(make_engine(tiny, num_pages=12, max_running=5, max_step_tokens=11, reserve_tokens=0), asked)
    assert seen.steps[-1].preemptions > 0
    for i in range(5):
        single = run(make_engine(tiny), [EngineRequest("r", prompt(30, start=i), params)])
        assert [t.logprob for t in seen.prompt_logprobs[f"r{i}"]] == pytest.approx(
            [t.logprob for t in single.prompt_logprobs["r"]], abs=2e-4
        )
        assert len(seen.prompt_logprobs[f"r{i}"]) == 29


def test_prefill_tells_the_logprobs_of_prompt_and_first_token(tiny: LoadedModel) -> None:
    params = greedy(5, logprobs=2, prompt_logprobs=1)
    whole = run(make_engine(tiny), [EngineRequest("r", prompt(60), params)])
    computed = prefilled(make_engine(tiny), "r", prompt(60), params)
    assert computed.logprobs == whole.logprobs["r"][0]
    assert computed.prompt_logprobs == whole.prompt_logprobs["r"]


def test_seeds_give_the_same_text_on_another_engine_with_other_pages(tiny: LoadedModel) -> None:
    params = SamplingParams(max_tokens=30, seed=77, top_p=0.9, ignore_eos=True)
    settings: list[Callable[[], EngineCore]] = [
        lambda: make_engine(tiny),
        lambda: make_engine(tiny, num_pages=5),
        lambda: make_engine(tiny, max_step_tokens=18),
    ]
    texts = [run(make(), [EngineRequest("r", prompt(50), params)]).tokens["r"] for make in settings]
    assert texts[0] == texts[1] == texts[2]
