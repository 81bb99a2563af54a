"""A prediction saves steps where it is right, and changes no token where it is wrong."""

from collections.abc import Sequence
from typing import Any, Final

import pytest

from components.errors import Rejected
from components.wire.sampling import SamplingParams
from components.wire.step_stats import DraftCounts
from engine.model.load import LoadedModel
from engine.ports import EngineRequest
from tests.engine.oracle import at_no_cost
from tests.engine.sampling.test_in_engine import VARIED
from tests.engine.tiny_engine import VOCAB, Seen, greedy, make_engine, prompt, run

LENGTH: Final = 60


def ask(loaded: LoadedModel, sampling: SamplingParams, prediction: Sequence[int] = ()) -> Seen:
    engine = at_no_cost(make_engine(loaded, speculative_tokens=7))
    return run(engine, [EngineRequest("r", prompt(30), sampling, prediction=prediction)])


@pytest.mark.parametrize("how", VARIED)
def test_a_right_prediction_saves_most_steps(tiny: LoadedModel, how: dict[str, Any]) -> None:
    sampling = SamplingParams(**{"max_tokens": LENGTH, "seed": 3, "ignore_eos": True, **how})
    plain = ask(tiny, sampling)
    answer = plain.tokens["r"]
    guessed = ask(tiny, sampling, answer)
    assert guessed.tokens["r"] == answer
    assert len(guessed.steps) <= 0.4 * len(answer)
    assert len(guessed.steps) <= len(plain.steps)


@pytest.mark.parametrize("prediction", [[7] * LENGTH, prompt(LENGTH, start=9), [VOCAB - 1], prompt(500)])
def test_a_wrong_prediction_changes_no_token(tiny: LoadedModel, prediction: list[int]) -> None:
    sampling = greedy(LENGTH, ignore_eos=True)
    assert ask(tiny, sampling, prediction).tokens == ask(tiny, sampling).tokens


def test_each_output_has_the_counts_so_far_of_its_branch(tiny: LoadedModel) -> None:
    sampling = SamplingParams(max_tokens=LENGTH, temperature=1.0, seed=6, ignore_eos=True, n=2)
    answer = ask(tiny, sampling).tokens["r"]
    engine = at_no_cost(make_engine(tiny, speculative_tokens=7))
    engine.submit(EngineRequest("r", prompt(30), sampling, prediction=answer))
    counts: dict[int, list[DraftCounts]] = {0: [], 1: []}
    while engine.has_work():
        output = engine.step()
        for tokens in output.tokens:
            if tokens.draft_counts is not None:
                before = counts[tokens.branch][-1] if counts[tokens.branch] else DraftCounts(0, 0)
                counts[tokens.branch].append(tokens.draft_counts)
                assert tokens.draft_counts.accepted - before.accepted >= len(tokens.token_ids) - 1
                assert tokens.draft_counts.checked > before.checked
            else:
                assert len(tokens.token_ids) == 1
    stats = output.stats
    last = [counts[branch][-1] for branch in (0, 1)]
    assert (stats.drafted_tokens, stats.accepted_tokens) == last[0].plus(last[1])
    assert last[0].accepted > 0.8 * last[0].checked > last[1].accepted, "the first branch is the predicted one"


@pytest.mark.parametrize(
    ("prediction", "why"), [([VOCAB], "vocabulary"), ([-1], "vocabulary"), ([7] * 513, "513 tokens")]
)
def test_a_bad_prediction_is_refused(tiny: LoadedModel, prediction: list[int], why: str) -> None:
    engine = make_engine(tiny)
    with pytest.raises(Rejected, match=why) as caught:
        engine.submit(EngineRequest("r", prompt(30), greedy(5), prediction=prediction))
    assert caught.value.fields["param"] == "prediction"
    assert not engine.has_work()
