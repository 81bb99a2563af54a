"""PREFILL and DECODE requests: their exposed pages, and the cached pages afterwards."""

import pytest

from components.errors import PromptTooLong, Rejected
from components.wire.sampling import SamplingParams
from components.wire.tokens import pack_tokens
from engine.core.engine_core import EngineCore
from engine.model.load import LoadedModel
from engine.ports import EngineRequest, Exposed, FinishReason, Phase, StepOutput
from engine.scheduler import request as scheduler_request
from tests.engine.tiny_engine import (
    EOS,
    GENERATING,
    Seen,
    alone,
    check_pages,
    greedy,
    make_engine,
    peek,
    prefilled,
    prompt,
    read_page,
    run,
    run_until_idle,
    small,
    write_page,
)

pytestmark = pytest.mark.usefixtures("pipeline")

LENGTHS = (1, 15, 16, 17, 32, 130)


def stats_of(engine: EngineCore) -> tuple[int, int]:
    """Return (held requests, held pages) after an idle step."""
    stats = engine.step().stats
    assert stats.free_pages + stats.cached_pages + stats.held_pages == stats.total_pages
    return stats.num_held, stats.held_pages


def reserve(engine: EngineCore, request_id: str, token_ids: list[int], sampling: SamplingParams) -> Exposed:
    engine.submit(EngineRequest(request_id, token_ids, sampling, Phase.DECODE))
    return run_until_idle(engine).reserved[request_id]


def spoil(engine: EngineCore, reserved: Exposed) -> None:
    """Write half of a transfer, after which the pages are unusable."""
    for page in reserved.pages[reserved.num_computed // engine.kv_region.layout.page_size :]:
        write_page(engine, page, b"\x3f" * engine.kv_region.layout.page_bytes)


@pytest.mark.parametrize("sampling", [greedy(24), SamplingParams(max_tokens=24, temperature=0.8, top_p=0.9, seed=7)])
@pytest.mark.parametrize("length", LENGTHS)
def test_a_request_split_over_two_engines_gives_the_tokens_of_one(
    tiny: LoadedModel, length: int, sampling: SamplingParams
) -> None:
    p, d = make_engine(tiny), make_engine(tiny)
    computed = prefilled(p, "r", prompt(length), sampling)
    assert computed.num_computed == length
    assert computed.first_token is not None
    reserved = reserve(d, "r", prompt(length), sampling)
    assert len(reserved.pages) == len(computed.pages)
    for source, target in zip(computed.pages, reserved.pages, strict=True):
        write_page(d, target, read_page(p, source))
    first = d.deliver("r", computed.first_token)
    rest = run_until_idle(d)
    assert [t for o in first for t in o.token_ids] + rest.tokens["r"] == alone(tiny, prompt(length), sampling)
    assert rest.prompt_tokens == 0, "decode computed prompt tokens"


def test_reserved_pages_that_decode_has_cached_need_no_transfer(tiny: LoadedModel) -> None:
    p, d = make_engine(tiny), make_engine(tiny)
    run(d, [EngineRequest("warm", prompt(40), greedy(1))])
    ids, answer = prompt(40) + prompt(9, start=5), greedy(12, ignore_eos=True)
    computed, reserved = prefilled(p, "r", ids, answer), reserve(d, "r", ids, answer)
    assert reserved.num_computed == 32
    for source, target in list(zip(computed.pages, reserved.pages, strict=True))[2:]:
        write_page(d, target, read_page(p, source))
    (first,) = d.deliver("r", computed.first_token or 0)
    assert first.num_cached_tokens == 32
    assert first.token_ids + run_until_idle(d).tokens["r"] == alone(tiny, ids, answer)


def test_chunks_of_a_prefill_are_told_as_they_are_computed(engine: EngineCore) -> None:
    seen = run(engine, [EngineRequest("r", prompt(130), greedy(5), Phase.PREFILL)])
    assert [c.num_computed for c in seen.computed["r"]] == [48, 96, 130]
    assert [c.first_token is None for c in seen.computed["r"]] == [True, True, False]
    assert {tuple(c.pages) for c in seen.computed["r"]} == {tuple(range(9))}
    assert "r" not in seen.tokens


def test_a_first_token_that_is_the_last_says_so(tiny: LoadedModel) -> None:
    computed = prefilled(make_engine(tiny), "r", prompt(20), greedy(1))
    assert computed.finish is FinishReason.LENGTH


def test_pages_of_a_computed_prompt_stay_held_until_release_and_are_found_afterwards(engine: EngineCore) -> None:
    prefilled(engine, "r", prompt(40), greedy(5))
    assert stats_of(engine) == (1, 3)
    engine.cancel("r")
    assert stats_of(engine) == (1, 3)
    engine.release("r")
    assert stats_of(engine) == (0, 0)
    assert peek(engine, prompt(40)) == 32
    engine.release("r")
    check_pages(engine)


def test_a_prefill_cancelled_half_way_stays_held_and_leaves_only_what_was_computed(engine: EngineCore) -> None:
    engine.submit(EngineRequest("r", prompt(130), greedy(5), Phase.PREFILL))
    while not engine.step().computed:
        pass
    engine.cancel("r")
    assert stats_of(engine) == (1, 9)
    engine.release("r")
    assert stats_of(engine) == (0, 0)
    assert peek(engine, prompt(130)) == 48


@pytest.mark.parametrize("steps", [0, 1])
def test_a_release_that_comes_before_the_end_is_remembered(engine: EngineCore, steps: int) -> None:
    engine.submit(EngineRequest("r", prompt(130), greedy(5), Phase.PREFILL))
    for _ in range(steps):
        engine.step()
    engine.release("r")
    assert stats_of(engine)[1] == 9, "it is still being computed"
    run_until_idle(engine)
    assert stats_of(engine) == (0, 0)


def test_a_cancelled_reservation_stays_held_and_is_never_found(engine: EngineCore) -> None:
    reserved = reserve(engine, "r", prompt(40), greedy(5))
    spoil(engine, reserved)
    engine.cancel("r")
    assert stats_of(engine) == (1, 3)
    assert engine.deliver("r", 7) == []
    engine.recompute("r")
    assert stats_of(engine) == (1, 3)
    engine.release("r")
    assert stats_of(engine) == (0, 0)
    assert peek(engine, prompt(40)) == 0


def test_delivered_pages_are_found_by_others(tiny: LoadedModel) -> None:
    p, d = make_engine(tiny), make_engine(tiny)
    computed, reserved = prefilled(p, "r", prompt(40), greedy(5)), reserve(d, "r", prompt(40), greedy(5))
    for source, target in zip(computed.pages, reserved.pages, strict=True):
        write_page(d, target, read_page(p, source))
    assert peek(d, prompt(40)) == 0
    d.deliver("r", computed.first_token or 0)
    assert peek(d, prompt(40)) == 32
    d.cancel("r")
    assert stats_of(d) == (0, 0), "delivered pages are no longer exposed"


def test_a_recomputed_request_gives_the_right_tokens_while_its_old_pages_are_still_written(tiny: LoadedModel) -> None:
    d = make_engine(tiny)
    reserved = reserve(d, "r", prompt(40), greedy(12))
    spoil(d, reserved)
    d.recompute("r")
    seen = Seen()
    while d.has_work():
        spoil(d, reserved)  # the sender was not lost
        seen.take(d.step())
        check_pages(d)
    assert seen.tokens["r"] == alone(tiny, prompt(40), greedy(12))
    assert stats_of(d) == (1, 3)
    d.release("r")
    assert stats_of(d) == (0, 0)


def test_releasing_the_old_pages_of_a_recomputed_request_leaves_it_running(tiny: LoadedModel) -> None:
    d = make_engine(tiny)
    reserve(d, "r", prompt(40), greedy(12))
    d.recompute("r")
    d.step()
    d.release("r")
    d.release("r")
    assert d.step().stats.num_running == 1
    d.cancel("r")
    assert stats_of(d) == (0, 0)


def test_a_delivered_end_token_finishes_the_request_at_once(engine: EngineCore) -> None:
    reserve(engine, "r", prompt(20), greedy(12))
    (output,) = engine.deliver("r", EOS)
    assert (output.token_ids, output.finish) == ([EOS], FinishReason.STOP)
    told = engine.step()  # of the blocks that it leaves
    assert not told.tokens
    assert not engine.has_work()
    assert stats_of(engine) == (0, 0)


def test_a_delivered_token_out_of_the_vocabulary_is_refused_and_may_be_recomputed(tiny: LoadedModel) -> None:
    d = make_engine(tiny)
    reserve(d, "r", prompt(20), greedy(4))
    with pytest.raises(Rejected, match="token id 99999"):
        d.deliver("r", 99999)
    d.recompute("r")
    assert run_until_idle(d).tokens["r"] == alone(tiny, prompt(20), greedy(4))


@pytest.mark.parametrize("phase", GENERATING)
def test_a_waiting_request_is_cancelled_without_a_trace(engine: EngineCore, phase: Phase) -> None:
    engine.submit(EngineRequest("r", prompt(20), greedy(12), phase))
    engine.cancel("r")
    assert not engine.has_work()
    assert stats_of(engine) == (0, 0)


def test_unknown_ids_are_ignored(engine: EngineCore) -> None:
    engine.cancel("nobody")
    engine.release("nobody")
    engine.recompute("nobody")
    assert engine.deliver("nobody", 7) == []
    output = engine.step()
    assert output == StepOutput(stats=output.stats)
    assert stats_of(engine) == (0, 0)


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (EngineRequest("r", prompt(64), greedy(5)), "64 tokens.*takes 64"),
        (EngineRequest("r", prompt(500), greedy(5)), "500 tokens.*takes 64"),
    ],
)
def test_a_prompt_that_could_never_fit_is_refused_with_both_numbers(
    tiny: LoadedModel, request_: EngineRequest, said: str
) -> None:
    with pytest.raises(PromptTooLong, match=said):
        make_engine(tiny, num_pages=4).submit(request_)


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (EngineRequest("r", [], greedy(5)), "at least one token"),
        (EngineRequest("r", [7, 128], greedy(5)), "token id 128 is not in the vocabulary of 128"),
        (EngineRequest("r", [7, -1], greedy(5)), "token id -1"),
        (EngineRequest("r", [7], greedy(0)), "max_tokens is 0"),
        (EngineRequest("r", [7], SamplingParams(max_tokens=1, temperature=-1)), "temperature is -1"),
        (EngineRequest("r", [7], SamplingParams(max_tokens=1, top_p=-0.5)), "top_p is -0.5"),
    ],
)
def test_a_wrong_request_is_refused_with_the_reason(engine: EngineCore, request_: EngineRequest, said: str) -> None:
    with pytest.raises(Rejected, match=said):
        engine.submit(request_)
    assert not engine.has_work()


def test_an_id_is_refused_while_its_pages_are_held(engine: EngineCore) -> None:
    prefilled(engine, "r", prompt(40), greedy(5))
    with pytest.raises(Rejected, match="in use"):
        engine.submit(EngineRequest("r", prompt(3), greedy(5)))
    engine.release("r")
    engine.submit(EngineRequest("r", prompt(3), greedy(5)))


def test_an_answer_ends_at_the_longest_context_for_length(tiny: LoadedModel) -> None:
    engine = make_engine(tiny, max_context=50)
    seen = run(engine, [EngineRequest("r", prompt(40), greedy(500, ignore_eos=True))])
    assert len(seen.tokens["r"]) == 10
    assert seen.finish["r"] is FinishReason.LENGTH


def test_a_stop_token_id_ends_the_answer_also_when_the_end_token_is_ignored(tiny: LoadedModel) -> None:
    made = alone(tiny, prompt(12), greedy(30, ignore_eos=True))
    stop = made[7]
    seen = run(make_engine(tiny), [EngineRequest("r", prompt(12), greedy(30, ignore_eos=True, stop_token_ids=(stop,)))])
    assert seen.tokens["r"] == made[: made.index(stop) + 1]
    assert seen.finish["r"] is FinishReason.STOP


def test_prefixes_are_shared_among_equal_salts_only(engine: EngineCore) -> None:
    run(engine, [EngineRequest("r", prompt(40), greedy(2), cache_salt="tenant-a")])
    assert peek(engine, prompt(40), "tenant-a") == 32
    assert peek(engine, prompt(40), "tenant-b") == 0
    assert peek(engine, prompt(40)) == 0


def test_a_prompts_blocks_that_somebody_has_made_are_not_made_again(
    engine: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(engine, [EngineRequest("r", prompt(32), greedy(1))])
    blocks = engine.prompt_blocks(pack_tokens(prompt(40)))
    assert engine.peek_prefix(blocks) == 32
    monkeypatch.setattr(scheduler_request, "block_hashes", lambda *_: pytest.fail("made again"))
    seen = run(engine, [EngineRequest("s", prompt(40), greedy(2), blocks=blocks)])
    assert seen.cached["s"] == 32
    assert peek(engine, prompt(40)) == 32


def test_the_region_describes_the_whole_pool(engine: EngineCore) -> None:
    region = engine.kv_region
    assert region.num_pages == small().num_pages
    assert region.num_bytes == 64 * 2 * 2 * 2 * 16 * 16 * 4
    assert region.layout.model.startswith("tiny-llama@")
