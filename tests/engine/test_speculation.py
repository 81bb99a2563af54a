"""Speculative decoding changes no token: right drafts save steps, wrong ones only cost computation."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from components.wire.layout import KvLayout, KvRegion
from components.wire.sampling import SamplingParams
from engine.core.engine_core import CPU_DRAFT_ROWS, EngineCore
from engine.model.load import LoadedModel
from engine.ports import EngineRequest, FinishReason, Phase
from engine.runner.step_runner import StepFailed
from engine.scheduler.request import Chunk
from engine.scheduler.step_cost import WORK_EXPONENT
from tests.engine.oracle import Oracle, at_no_cost, guided, texts_of
from tests.engine.sampling.test_in_engine import VARIED, Cycle
from tests.engine.test_engine_stateful import MAX_CONTEXT, PROMPTS, SAMPLINGS, alone_on, run_machine
from tests.engine.tiny_engine import (
    VOCAB,
    Seen,
    greedy,
    make_engine,
    prefilled,
    prompt,
    read_page,
    run,
    run_until_idle,
    small,
    write_page,
)


class Strict(Cycle):
    """Fails after a token that it did not allow, like a compiled grammar."""

    def accept(self, token_id: int) -> None:
        assert token_id == self.tokens[len(self.accepted) % len(self.tokens)]
        super().accept(token_id)

    def fork(self) -> "Strict":
        return Strict(self.tokens, self.accepted)


def chunks_of(engine: EngineCore) -> list[Sequence[Chunk]]:
    """Record the chunks of each step."""
    launched: list[Sequence[Chunk]] = []
    launch = engine._runner.launch

    def watched(chunks: Sequence[Chunk]) -> Any:
        launched.append(list(chunks))
        return launch(chunks)

    engine._runner.launch = watched  # type: ignore[method-assign]
    return launched


ROOM = {"max_running": 24, "num_pages": 200}


def requests_for(sampling: SamplingParams, count: int = 3, **changes: Any) -> list[EngineRequest]:
    return [EngineRequest(f"r{i}", prompt(20 + 17 * i, start=i), sampling, **changes) for i in range(count)]


@pytest.mark.parametrize("lies", [0, 3])
@pytest.mark.parametrize("how", VARIED)
def test_answers_are_the_same_in_fewer_steps(tiny: LoadedModel, how: dict[str, Any], lies: int) -> None:
    sampling = SamplingParams(**{"max_tokens": 40, "seed": 3, **how})
    plain = run(make_engine(tiny), requests_for(sampling))
    engine = guided(
        make_engine(tiny), texts_of(plain, {r.request_id: list(r.token_ids) for r in requests_for(sampling)}), lies
    )
    guessed = run(engine, requests_for(sampling))
    assert guessed.tokens == plain.tokens
    assert guessed.finish == plain.finish
    assert guessed.logprobs.keys() == plain.logprobs.keys()
    for name, logprobs in plain.logprobs.items():
        assert [one.logprob for one in guessed.logprobs[name]] == pytest.approx(
            [one.logprob for one in logprobs], rel=1e-4
        )
    stats = guessed.steps[-1]
    assert 0 < stats.accepted_tokens <= stats.drafted_tokens
    assert (stats.accepted_tokens == stats.drafted_tokens) == (lies == 0)
    assert len(guessed.steps) < 0.8 * len(plain.steps)
    assert sum(s.decode_tokens for s in guessed.steps) == sum(map(len, plain.tokens.values()))


def test_branches_are_the_same(tiny: LoadedModel) -> None:
    sampling = SamplingParams(max_tokens=30, temperature=1.0, seed=6, ignore_eos=True, frequency_penalty=0.5, n=3)
    plain = run(make_engine(tiny), requests_for(sampling, 1))
    engine = guided(make_engine(tiny), texts_of(plain, {"r0": prompt(20)}), lies=4)
    guessed = run(engine, requests_for(sampling, 1))
    assert (guessed.tokens, guessed.branches) == (plain.tokens, plain.branches)
    assert guessed.steps[-1].accepted_tokens > 0


def test_drafts_that_a_mask_forbids_are_not_checked(tiny: LoadedModel) -> None:
    wanted = [10, 11, 12, 13, 14]
    engine = guided(make_engine(tiny), [[*prompt(20), *wanted, 99, 98], [*prompt(20), *wanted, *wanted]])
    steps = chunks_of(engine)
    seen = run(engine, [EngineRequest("r", prompt(20), greedy(10, ignore_eos=True), mask=Strict(wanted))])
    assert {draft for chunks in steps for chunk in chunks for draft in chunk.drafts} <= set(wanted)
    assert seen.tokens["r"] == wanted * 2
    assert seen.steps[-1].accepted_tokens >= 4


def test_nothing_comes_after_a_stop_token_or_the_last_allowed_one(tiny: LoadedModel) -> None:
    plain = run(make_engine(tiny), requests_for(greedy(40, ignore_eos=True), 1)).tokens["r0"]
    at = next(i for i in range(8, 40) if plain[i] not in plain[:i])
    texts = [prompt(20) + plain]
    engine = guided(make_engine(tiny), texts)
    steps = chunks_of(engine)
    stopped = run(engine, requests_for(greedy(40, ignore_eos=True, stop_token_ids=(plain[at],)), 1))
    assert (stopped.tokens["r0"], stopped.finish["r0"]) == (plain[: at + 1], FinishReason.STOP)
    drafts = [draft for chunks in steps for chunk in chunks for draft in chunk.drafts]
    assert drafts
    assert plain[at] not in drafts, "the row before draws it; those behind it counted as right"
    assert stopped.steps[-1].accepted_tokens == len(drafts) <= at
    for count in range(1, 12):
        engine = guided(make_engine(tiny), texts)
        steps = chunks_of(engine)
        limited = run(engine, requests_for(greedy(count, ignore_eos=True), 1))
        assert max(chunk.end for chunks in steps for chunk in chunks) < 20 + count, "the last token needs no KV"
        assert (limited.tokens["r0"], limited.finish["r0"]) == (plain[:count], FinishReason.LENGTH)
    at_the_end = run(guided(make_engine(tiny, max_context=37), texts), requests_for(greedy(40, ignore_eos=True), 1))
    assert at_the_end.tokens["r0"] == plain[:17]


def test_what_was_guessed_is_cached_as_what_was_computed_alone(tiny: LoadedModel) -> None:
    first = requests_for(greedy(60, ignore_eos=True), 1)
    plain = run(make_engine(tiny), first).tokens["r0"]
    engine = guided(make_engine(tiny), [prompt(20) + plain], lies=3)
    run(engine, first)
    again = EngineRequest("again", prompt(20) + plain[:50], greedy(10, ignore_eos=True))
    seen = run(engine, [again])
    assert seen.cached["again"] == 64
    assert seen.tokens["again"] == plain[50:60]


def test_a_step_with_drafts_has_few_rows_and_many_decodes_leave_no_place_for_drafts(tiny: LoadedModel) -> None:
    requests = [EngineRequest(f"r{i}", prompt(12, start=i), greedy(20 + 3 * i, ignore_eos=True)) for i in range(24)]
    plain = run(make_engine(tiny, **ROOM), requests)
    engine = guided(make_engine(tiny, **ROOM), texts_of(plain, {r.request_id: list(r.token_ids) for r in requests}))
    steps = chunks_of(engine)
    assert run(engine, requests).tokens == plain.tokens
    decodes = [[chunk for chunk in chunks if chunk.start >= chunk.request.prompt_len] for chunks in steps]
    guessed = [chunks for chunks in decodes if any(chunk.drafts for chunk in chunks)]
    assert max(sum(chunk.length for chunk in chunks) for chunks in guessed) == CPU_DRAFT_ROWS
    assert all(len(chunks) < CPU_DRAFT_ROWS for chunks in guessed)
    assert max(map(len, decodes)) > CPU_DRAFT_ROWS
    assert max(sum(chunk.length for chunk in chunks) for chunks in steps) == 48, "the budget of a step"


def test_the_cost_of_decodes_is_learned_without_that_of_their_drafts(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps with prompts have no drafts, but the cost of other steps' drafts lengthened their chunks by half."""
    clock = [0.0]
    monkeypatch.setattr("engine.core.engine_core.perf_counter", lambda: clock[0])
    requests = requests_for(greedy(40, ignore_eos=True))
    plain = run(make_engine(tiny), requests)
    engine = guided(
        make_engine(tiny, speculative_tokens=7, pipeline="off"),
        texts_of(plain, {r.request_id: list(r.token_ids) for r in requests}),
    )
    assert engine._chunk_limit is not None
    steps, learned = chunks_of(engine), []
    launch = engine._runner.launch

    def takes_s(rows: int) -> float:
        return 0.01 + 0.001 * rows**WORK_EXPONENT

    def launch_for(chunks: list[Chunk]) -> Any:
        clock[0] += takes_s(sum(chunk.length for chunk in chunks))
        return launch(chunks)

    monkeypatch.setattr(engine._runner, "launch", launch_for)
    monkeypatch.setattr(engine._chunk_limit, "stepped", lambda *numbers: learned.append(numbers))
    run(engine, requests)
    assert max(sum(chunk.length for chunk in chunks) for chunks in steps[-20:]) > len(requests), "there are drafts"
    for chunks, (prompt_rows, decodes, _) in zip(steps, learned, strict=True):
        assert prompt_rows == sum(c.length for c in chunks if c.is_prompt)
        assert decodes == sum(1 for c in chunks if not c.is_prompt)
        assert not (prompt_rows and any(chunk.drafts for chunk in chunks))
    late = [step_s - takes_s(decodes) for prompt_rows, decodes, step_s in learned[-10:] if not prompt_rows]
    assert late
    assert max(map(abs, late)) < 0.004, "the time of the decodes alone"


def test_the_cost_of_a_row_is_learned_from_steps_of_decodes_alone(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not from steps with prompts, nor from those that only reserve pages for a DECODE."""
    engine = make_engine(tiny, speculative_tokens=3, pipeline="off")
    cost = engine._row_cost
    assert cost is not None
    steps, learned = chunks_of(engine), []
    monkeypatch.setattr(cost, "stepped", lambda rows, _step_s: learned.append(rows))
    seen = run(engine, requests_for(greedy(30, ignore_eos=True, logit_bias=((77, 100.0),))))
    engine.submit(EngineRequest("d", prompt(20), greedy(9), Phase.DECODE))
    assert engine.step().reserved
    decodes = [chunks for chunks in steps if all(chunk.start >= chunk.request.prompt_len for chunk in chunks)]
    assert learned == [sum(chunk.length for chunk in chunks) for chunks in decodes]
    assert max(learned) > len(seen.tokens), "drafts are rows"


def test_the_needed_chance_is_asked_for_no_more_drafts_than_a_request_may_have(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was averaged over all free rows, so a single client's drafts seemed too expensive."""
    engine = make_engine(tiny, speculative_tokens=3, pipeline="off")
    cost, asked_for = engine._row_cost, list[tuple[int, int, int]]()
    assert cost is not None

    def least_chance(decodes: int, rows: int, drafts: int) -> float:
        asked_for.append((decodes, rows, drafts))
        return 1.0

    monkeypatch.setattr(cost, "least_chance", least_chance)
    engine.submit(EngineRequest("alone", prompt(5), greedy(6, ignore_eos=True)))
    while engine.has_work():
        engine.step()
    assert set(asked_for) == {(1, 1, 3)}


def test_no_cost_is_learned_from_a_step_that_failed(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(tiny, speculative_tokens=3, pipeline="off")
    assert engine._row_cost is not None
    learned: list[int] = []
    monkeypatch.setattr(engine._row_cost, "stepped", lambda rows, _step_s: learned.append(rows))

    def failing(chunks: Sequence[Chunk]) -> Any:
        raise StepFailed("no memory")

    engine.submit(requests_for(greedy(9, ignore_eos=True), 1)[0])
    engine.step()
    monkeypatch.setattr(engine._runner, "launch", failing)
    assert engine.step().failed
    assert not learned


def test_all_requests_share_the_places_for_drafts(tiny: LoadedModel) -> None:
    requests = [
        EngineRequest(f"r{i}", prompt(12, start=i), greedy(30, ignore_eos=True)) for i in range(CPU_DRAFT_ROWS // 2)
    ]
    plain = run(make_engine(tiny), requests)
    engine = guided(make_engine(tiny), texts_of(plain, {r.request_id: list(r.token_ids) for r in requests}))
    steps = chunks_of(engine)
    assert run(engine, requests).tokens == plain.tokens
    full = [[len(chunk.drafts) for chunk in chunks] for chunks in steps[3:8]]
    assert full == [[1, 1, 1, 1, 1, 1]] * len(full)


def test_a_step_with_a_prompt_has_no_drafts(tiny: LoadedModel) -> None:
    requests = requests_for(greedy(60, ignore_eos=True), 2)
    sizes = {"max_step_tokens": 16, "max_running": 8}
    plain = run(make_engine(tiny, **sizes), requests)
    texts = texts_of(plain, {r.request_id: list(r.token_ids) for r in requests})
    engine = guided(make_engine(tiny, **sizes, itl_target_ms=0), texts)
    for request in requests:
        engine.submit(request)
    while min((len(r.tokens) - r.prompt_len for r in engine._scheduler.running), default=0) < 4:
        engine.step()
    engine.submit(EngineRequest("prompt", prompt(40, start=5), greedy(2, ignore_eos=True)))
    steps = chunks_of(engine)
    computed = [engine.step().stats.prompt_tokens for _ in range(5)]
    assert computed == [14, 14, 12, 0, 0]
    drafts = [sum(len(chunk.drafts) for chunk in chunks) for chunks in steps]
    assert drafts[:3] == [0, 0, 0]
    assert min(drafts[3:]) > 0


def test_drafts_take_no_page_that_a_decode_needs(tiny: LoadedModel) -> None:
    """The second request needs the last free page for its next token, the first one only for drafts."""
    requests = [
        EngineRequest("drafts", prompt(10), greedy(20, ignore_eos=True)),
        EngineRequest("decodes", prompt(16, start=1), greedy(2, ignore_eos=True)),
    ]
    plain = run(make_engine(tiny, num_pages=3, reserve_tokens=0), requests)
    texts = texts_of(plain, {r.request_id: list(r.token_ids) for r in requests})
    engine = guided(make_engine(tiny, num_pages=3, reserve_tokens=0), texts)
    steps = chunks_of(engine)
    guessed = run(engine, requests)
    assert guessed.tokens == plain.tokens
    assert guessed.steps[-1].preemptions == plain.steps[-1].preemptions == 0
    assert [len(chunk.drafts) for chunk in steps[1]] == [5, 0], "up to the end of the page"


def test_a_prompt_is_not_admitted_for_a_page_that_drafts_took(tiny: LoadedModel) -> None:
    """A page beyond the reserve, taken by wrong drafts, counted as a future page."""
    first = EngineRequest("drafts", prompt(13), greedy(40, ignore_eos=True))
    plain = run(make_engine(tiny), [first]).tokens["drafts"]
    engine = guided(make_engine(tiny, num_pages=6, reserve_tokens=0), [prompt(13) + plain], lies=1)
    engine.submit(first)
    engine.step()
    engine.step()
    engine.submit(EngineRequest("prompt", prompt(80, start=1), greedy(2, ignore_eos=True)))
    seen = run_until_idle(engine)
    assert plain[-len(seen.tokens["drafts"]) :] == seen.tokens["drafts"]


@pytest.mark.parametrize("max_running", [1, 2])
def test_a_small_batch_has_as_many_drafts(tiny: LoadedModel, max_running: int) -> None:
    (request,) = requests_for(greedy(40, ignore_eos=True), 1)
    plain = run(make_engine(tiny), [request]).tokens["r0"]
    engine = guided(make_engine(tiny, max_running=max_running), [prompt(20) + plain])
    steps = chunks_of(engine)
    assert run(engine, [request]).tokens["r0"] == plain
    assert max(chunk.length for chunks in steps for chunk in chunks if chunk.drafts) == CPU_DRAFT_ROWS


@pytest.mark.parametrize("phase", [Phase.FULL, Phase.PREFILL])
def test_a_prompt_of_one_token_is_no_decode(tiny: LoadedModel, phase: Phase) -> None:
    sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, n=3)
    request = EngineRequest("r", prompt(1), sampling, phase)
    plain = run(make_engine(tiny), [request])
    engine = guided(make_engine(tiny), [prompt(1) + [7] * 20])
    steps = chunks_of(engine)
    guessed = run(engine, [request])
    assert guessed.tokens == plain.tokens
    assert not steps[0][0].drafts


def test_a_step_is_not_planned_ahead_while_its_tokens_are_guessed() -> None:
    class OnDevice:
        takes_cpu = False
        copy_pages = None

    layout = KvLayout(model="m", dtype="float32", page_size=16, layers=1, kv_heads=1, head_dim=8)
    settings = {
        "runner": OnDevice(),
        "config": small(pipeline="auto"),
        "region": KvRegion(0, 64, layout, "cpu"),
        "max_context": 512,
        "vocab_size": VOCAB,
        "eos_token_ids": frozenset(),
    }
    assert EngineCore(**settings)._pipelined
    assert not EngineCore(**settings, make_drafter=lambda tokens, _: Oracle([], tokens, 0))._pipelined


def test_a_stream_whose_kv_came_from_elsewhere_is_guessed_too(tiny: LoadedModel) -> None:
    sampling = greedy(40, ignore_eos=True)
    plain = run(make_engine(tiny), requests_for(sampling, 1)).tokens["r0"]
    elsewhere = make_engine(tiny)
    computed = prefilled(elsewhere, "p", prompt(20), sampling)
    engine = guided(make_engine(tiny), [prompt(20) + plain])
    engine.submit(EngineRequest("d", prompt(20), sampling, Phase.DECODE))
    seen = Seen()
    seen.take(engine.step())
    for page, source in zip(seen.reserved["d"].pages, computed.pages, strict=False):
        write_page(engine, page, read_page(elsewhere, source))
    first = engine.deliver("d", plain[0])
    run_until_idle(engine, seen)
    assert [*first[0].token_ids, *seen.tokens["d"]] == plain
    assert seen.steps[-1].accepted_tokens > 30


@pytest.mark.parametrize("when", [1, 2, 3])
def test_a_request_that_is_cancelled_while_drafts_are_checked_gives_back_its_pages(
    tiny: LoadedModel, when: int
) -> None:
    plain = run(make_engine(tiny), requests_for(greedy(40, ignore_eos=True), 1)).tokens["r0"]
    engine = guided(make_engine(tiny), [prompt(20) + plain])
    steps = chunks_of(engine)
    engine.submit(requests_for(greedy(40, ignore_eos=True), 1)[0])
    for _ in range(when):
        engine.step()
    launch = engine._runner.launch

    def cancelled(chunks: Sequence[Chunk]) -> Any:
        launched = launch(chunks)
        engine.cancel("r0")
        return launched

    engine._runner.launch = cancelled  # type: ignore[method-assign]
    output = engine.step()
    assert steps[-1][0].drafts
    assert not output.tokens
    run_until_idle(engine)
    assert engine.step().stats.held_pages == 0


def test_a_text_that_repeats_itself_is_guessed_from_its_own_tokens(tiny: LoadedModel) -> None:
    """With the default lookup. The bias makes the model repeat one token."""
    sampling = greedy(50, ignore_eos=True, logit_bias=((77, 100.0),))
    plain = run(make_engine(tiny), requests_for(sampling))
    guessed = run(at_no_cost(make_engine(tiny, speculative_tokens=4, pipeline="off")), requests_for(sampling))
    assert guessed.tokens == plain.tokens
    assert guessed.steps[-1].accepted_tokens > 50


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("reserve_tokens", "lies"), [(8, 5), (0, 1)])
def test_pages_add_up_and_tokens_are_right_whatever_happens_while_drafts_are_checked(
    tiny: LoadedModel, reserve_tokens: int, lies: int
) -> None:
    prompts = {
        f"{which}.{how}": EngineRequest(f"{which}.{how}", PROMPTS[which], SAMPLINGS[how])
        for which in range(len(PROMPTS))
        for how in range(len(SAMPLINGS))
    }
    seen = run(make_engine(tiny, num_pages=200, max_context=MAX_CONTEXT), prompts.values())
    texts = texts_of(seen, {name: list(request.token_ids) for name, request in prompts.items()})

    def make(page_size: int, **changes: object) -> EngineCore:
        sized = replace(tiny, layout=structs.replace(tiny.layout, page_size=page_size))
        settings = {**changes, "page_size": page_size, "reserve_tokens": reserve_tokens}
        return guided(make_engine(sized, **settings), texts, lies)

    run_machine(make, 12, alone_on(tiny))
