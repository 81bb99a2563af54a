"""Simulated fleets: closed forms, counts by hand, failures, and bounds of each policy."""

import itertools
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import typer
from typer.testing import CliRunner

from bench.load.workloads import poisson_times_s
from bench.simulate.__main__ import engine_on, main, speeds_of, with_queries
from bench.simulate.fit import fit
from bench.simulate.fleet import Fleet
from bench.simulate.incidents import Incident, Kind, Role, check, flapping, parse
from bench.simulate.measured import Measured
from bench.simulate.routers import Delays, MakePolicy
from bench.simulate.setup import Link, Setup
from bench.simulate.traffic import Lengths, Request, conversations, shared_prefixes, trace
from bench.simulate.worker import Engine
from components.routing.cache_policies import KvAware, KvWeights
from components.routing.policies import PolicyName, WorkerRole, parse_policy
from engine.config import MockConfig
from tests.waiting import PATIENCE_S

REPO = Path(__file__).resolve().parents[2]
FAST = MockConfig(speedup=10)
ENGINE = Engine(FAST, num_pages=4096, page_tokens=64)
LENGTHS = Lengths(prefix=1024, question=128, answer=32, block=64)


def policy(name: PolicyName, role: WorkerRole = "decode") -> MakePolicy:
    return lambda rng: parse_policy(name).make(role, rng)


def simulated(
    setup: Setup, traffic: Iterable[Request], name: PolicyName = "least_load", incidents: Sequence[Incident] = ()
) -> tuple[Fleet, Measured]:
    fleet = Fleet(setup, traffic, policy(name), policy(name, "prefill"), incidents)
    return fleet, fleet.run()


def steady(count: int, gap_s: float, prompt: int = 512, output: int = 16) -> list[Request]:
    """Make requests that share nothing."""
    return [Request(n, n * gap_s, prompt, output, []) for n in range(count)]


def computed(fleet: Fleet) -> list[int]:
    """Prompt tokens by decode worker."""
    return [w.prompt_tokens for w in fleet.decodes.workers]


def check_empty(fleet: Fleet) -> None:
    for worker in (*fleet.decodes.workers, *fleet.prefills.workers):
        assert not worker.alive or worker.idle, f"{worker.name} has {worker.pool.used} pages"


# --- closed forms


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_one_queue_waits_as_long_as_m_d_1(load: float) -> None:
    """Pollaczek and Khinchine: rho / (2 (1 - rho)) service times. 15,000 arrivals are within 6 % of it."""
    service_s = 0.1 + 100 * 0.001
    cost = MockConfig(step_s=0.1, prompt_token_s=0.001, decode_s=0, context_token_s=0)
    times = itertools.islice(poisson_times_s(Random(3), load / service_s), 15_000)
    requests = (Request(n, at_s, 100, 1, []) for n, at_s in enumerate(times))
    _, measured = simulated(Setup(1, engine=Engine(cost, max_step_tokens=100)), requests)
    waited_s = statistics.fmean(measured.ttft_s) - service_s
    assert waited_s == pytest.approx(service_s * load / (2 * (1 - load)), rel=0.06)


def test_littles_law_holds_for_heartbeats() -> None:
    """The mean number of requests is arrivals a second times seconds of each."""
    fleet = Fleet(Setup(3, 2, ENGINE), shared_prefixes(1, 3000, 20.0, 10, 1.0, LENGTHS), policy("least_load"))
    seen: list[int] = []

    def look(_: object) -> None:
        seen.append(sum(len(fleet.decodes.flows[w]) for w in fleet.decodes.workers))
        fleet.clock.at(fleet.clock.now_s + 0.05, look)

    look(None)
    measured = fleet.run()
    expected = len(measured.e2e_s) / measured.duration_s * statistics.fmean(measured.e2e_s)
    assert statistics.fmean(seen) == pytest.approx(expected, rel=0.02)
    assert measured.in_flight_s / measured.duration_s == pytest.approx(expected)


def test_hits_of_endless_caches_are_what_a_count_by_hand_finds() -> None:
    requests = list(conversations(5, 400, 0.02, 6.0, 300.0, LENGTHS))  # so slowly that each ends before the next
    known: set[bytes] = set()
    found = 0
    for request in requests:
        most = (request.prompt - 1) // 64
        found += 64 * sum(1 for _ in itertools.takewhile(known.__contains__, request.blocks[:most]))
        known.update(request.blocks)
    engine = replace(ENGINE, num_pages=10**6)
    _, measured = simulated(Setup(1, engine=engine), requests)
    assert sum(share.cached_tokens for share in measured.workers) == found
    assert sum(share.prompt_tokens for share in measured.workers) == sum(r.prompt for r in requests)
    assert 0.5 < measured.figures()["cache_hit"] < 1


def test_a_cache_never_holds_more_than_its_pages() -> None:
    fleet, measured = simulated(
        Setup(1, engine=replace(ENGINE, num_pages=100)), conversations(5, 400, 2.0, 6.0, 3.0, LENGTHS)
    )
    worker = fleet.decodes.workers[0]
    assert worker.pool.used + worker.pool.cached <= 100
    assert worker.pool.cached > 50
    assert 0 < measured.figures()["cache_hit"] < 0.9
    held = {block for request in conversations(5, 400, 2.0, 6.0, 3.0, LENGTHS) for block in request.blocks}
    index = fleet.decodes.routers._index
    fleet.decodes.routers._apply_events(float("inf"))
    assert index.blocks_of(worker.name) == {block for block in held if worker.pool.match([block], 1)}, (
        "events tell it all"
    )


# --- the same again


def test_a_seed_makes_the_same_run() -> None:
    def run(seed: int) -> dict[str, object]:
        traffic = shared_prefixes(seed, 500, 30.0, 10, 1.0, LENGTHS)
        crash = [Incident(5.0, "crash"), Incident(6.0, "crash", "prefill", 1)]
        _, measured = simulated(Setup(3, 2, ENGINE, seed=seed), traffic, "power_of_two", crash)
        return {key: value for key, value in measured.figures().items() if key != "cpu_s"}

    assert run(1) == run(1)
    assert run(1) != run(2)


# --- failures, and fleets that grow and shrink


@pytest.mark.parametrize("prefill", [0, 3])
@pytest.mark.parametrize("name", ["round_robin", "kv_aware"])
def test_failures_lose_no_request_and_no_page(prefill: int, name: PolicyName) -> None:
    incidents = [Incident(2.0, "crash"), Incident(3.1, "crash", "decode", 2), Incident(30.0, "add")]
    if prefill:
        incidents += [Incident(t, "crash", "prefill", w) for w, t in enumerate((1.5, 3.05, 8.0))]
        incidents += [Incident(15.0, "add", "prefill")]
    traffic = list(shared_prefixes(4, 1200, 40.0, 8, 1.0, replace(LENGTHS, answer=256)))
    fleet, measured = simulated(Setup(3, prefill, ENGINE), traffic, name, incidents)
    assert len(measured.e2e_s) == measured.arrived == 1200
    assert measured.output_tokens == sum(request.output for request in traffic)
    assert measured.moved > 5
    assert all(request.at_s < request.first_s for request in traffic)
    check_empty(fleet)


def test_a_prompt_that_waits_for_a_lost_decode_gives_its_pages_back() -> None:
    """The second one is computed while decode has no page for it; then decode dies, and it is computed again."""
    setup = Setup(1, 1, replace(ENGINE, num_pages=20), prefill_engine=ENGINE)
    requests = [Request(n, 0.0, 640, 500, []) for n in range(2)]
    fleet, measured = simulated(setup, requests, incidents=[Incident(0.2, "crash"), Incident(1.0, "add")])
    assert (measured.moved, len(measured.e2e_s)) == (2, 2)
    assert fleet.prefills.workers[0].prompt_tokens > 2 * 640
    check_empty(fleet)


def test_a_moved_answer_goes_on_from_the_tokens_it_has() -> None:
    cost = MockConfig(step_s=1.0, prompt_token_s=0, decode_s=0, context_token_s=0)
    setup = Setup(2, engine=Engine(cost, page_tokens=64), delays=Delays(lost_s=2.0))
    _, measured = simulated(setup, [Request(0, 0.0, 10, 20, [])], "round_robin", [Incident(5.5, "crash", "decode", 0)])
    assert list(measured.ttft_s) == [1.0]
    assert list(measured.e2e_s) == [pytest.approx(5.5 + 2.0 + 15)], "five tokens were out"


def test_without_anybody_requests_wait_for_who_comes() -> None:
    fleet, measured = simulated(Setup(0, engine=ENGINE), steady(20, 0.1), incidents=[Incident(10.0, "add")])
    assert len(measured.e2e_s) == 20
    assert min(measured.e2e_s) > 8.0
    check_empty(fleet)


def test_decode_computes_the_few_tokens_after_its_own_prefix_hit() -> None:
    """Two prompts of 2,048 tokens and 10 more: prefill computes the first, decode the rest of the second."""
    blocks = [bytes([i]) * 16 for i in range(32)]
    twice = [Request(n, 5.0 * n, 2058, 4, blocks) for n in range(2)]
    fleet, _ = simulated(Setup(1, 1, ENGINE), twice)
    assert (fleet.prefills.workers[0].prompt_tokens, fleet.decodes.workers[0].prompt_tokens) == (2058, 2058)
    assert fleet.decodes.workers[0].cached_tokens == 2048
    twice = [Request(n, 5.0 * n, 2080, 4, blocks) for n in range(2)]
    fleet, _ = simulated(Setup(1, 1, ENGINE), twice)
    assert (fleet.prefills.workers[0].prompt_tokens, fleet.decodes.workers[0].prompt_tokens) == (4160, 0)


def test_a_worker_that_drains_while_its_last_kv_moves_has_sent_it() -> None:
    """It left when all was sent, and the request counted as lost."""
    setup = Setup(1, 1, ENGINE, link=Link(bytes_per_s=1e7))
    fleet = Fleet(setup, steady(1, 1.0), policy("least_load"), None, [Incident(0.3, "drain", "prefill", 0)])
    measured = fleet.run(until_s=60.0)
    assert len(measured.e2e_s) == 1
    assert measured.e2e_s[0] > 1.0, "it was drained while KV moved"


def test_who_drains_gets_nothing_new_and_goes_when_it_is_done() -> None:
    setup = Setup(2, 2, ENGINE)
    drain = [Incident(10.0, "drain", "decode", 0), Incident(12.0, "drain", "prefill", 1)]
    fleet, measured = simulated(setup, steady(400, 0.1, output=64), "round_robin", drain)
    assert len(measured.e2e_s) == 400
    assert measured.moved == 0
    for worker, at_s in ((fleet.decodes.workers[0], 10.0), (fleet.prefills.workers[1], 12.0)):
        assert worker.until_s is not None
        assert at_s <= worker.until_s < at_s + 3
    assert fleet.prefills.workers[0].prompt_tokens > fleet.prefills.workers[1].prompt_tokens * 1.8
    check_empty(fleet)


def test_workers_that_come_take_their_part_and_shorten_the_queue() -> None:
    """With three times the prompts of one worker, and three workers added, the last prompts wait like the first."""
    gap_s = 512 * FAST.prompt_token_s / 10 / 3
    crowd, helped = steady(4000, gap_s, output=1), steady(4000, gap_s, output=1)
    simulated(Setup(1, engine=ENGINE), crowd)
    fleet, _ = simulated(Setup(1, engine=ENGINE), helped, incidents=[Incident(2.0, "add") for _ in range(3)])
    assert max(r.first_s - r.at_s for r in crowd[-100:]) > 60
    assert max(r.first_s - r.at_s for r in helped[-100:]) < 1
    assert min(computed(fleet)) > 0.15 * sum(computed(fleet))


# --- where routing goes wrong


def hot(count: int, rate: float) -> list[Request]:
    """All prompts share 4,096 tokens. One worker has computed them before the other requests arrive."""
    lengths = Lengths(prefix=4096, question=64, answer=8, sigma=0.3, block=64)
    requests = list(shared_prefixes(9, count, rate, 1, 0.0, lengths))
    for request in requests[1:]:
        request.at_s += 2.0
    return requests


@pytest.mark.parametrize("name", ["kv_aware", "cache_aware", "prefix_hash"])
def test_a_hot_prefix_is_cached_by_many_and_overloads_no_worker(name: PolicyName) -> None:
    """One worker computes 280 such questions a second; 700 come."""
    fleet, measured = simulated(Setup(8, engine=ENGINE), hot(3000, 700.0), name)
    assert measured.figures()["cache_hit"] > 0.95
    assert max(computed(fleet)) < 2 * statistics.fmean(computed(fleet))
    assert measured.figures()["ttft_ms_p99"] < 1000, "the prefix is computed once everywhere"


def test_a_hot_prefix_overloads_one_worker_where_only_the_cache_counts() -> None:
    """So the test above can fail: if only the cache counts, one is overloaded and the rest are idle."""
    weights = KvWeights(queued=0, request=0, spill=1e9)
    fleet = Fleet(Setup(8, engine=ENGINE), hot(3000, 700.0), lambda rng: KvAware(rng, weights))
    assert fleet.run().figures()["ttft_ms_p99"] > 3000
    assert max(computed(fleet)) > 5 * statistics.fmean(computed(fleet))


def test_a_herd_is_spread_evenly_before_any_heartbeat_reports_it() -> None:
    """400 requests at once for 40 idle workers: the router only knows its own requests."""
    requests = [Request(n, 1.0, 512, 4, []) for n in range(400)]
    for name, bound in (("least_load", 1), ("kv_aware", 1), ("power_of_two", 5)):
        fleet, measured = simulated(Setup(40, engine=ENGINE), requests, name)
        prompts = [tokens // 512 for tokens in computed(fleet)]
        assert max(prompts) <= 10 + bound, f"{name}: {prompts}"
        assert len(measured.e2e_s) == 400


def test_a_herd_of_many_routers_is_bounded_where_two_are_drawn() -> None:
    """Each of 40 routers has ten requests, and knows only its own."""
    requests = [Request(n, 1.0, 512, 4, []) for n in range(400)]
    for name in ("least_load", "power_of_two", "kv_aware"):
        fleet, _ = simulated(Setup(40, engine=ENGINE, decode_routers=40), requests, name)
        assert max(computed(fleet)) // 512 <= 22, name


@pytest.mark.parametrize("name", ["kv_aware", "least_load"])
def test_a_slow_worker_gets_less_and_holds_up_few(name: PolicyName) -> None:
    slow = [Incident(0.0, "slow", "prefill", 0, 5.0)]
    lengths = replace(LENGTHS, answer=4)
    load = list(shared_prefixes(2, 2000, 50.0, 500, 0.0, lengths))
    fleet, measured = simulated(Setup(2, 4, ENGINE), load, name, slow)
    prompts = [w.prompt_tokens for w in fleet.prefills.workers]
    assert prompts[0] < 0.4 * statistics.fmean(prompts[1:])
    _, blind = simulated(
        Setup(2, 4, ENGINE), list(shared_prefixes(2, 2000, 50.0, 500, 0.0, lengths)), "round_robin", slow
    )
    assert measured.figures()["ttft_ms_p90"] < 0.05 * blind.figures()["ttft_ms_p90"]


def test_a_flapping_worker_costs_only_what_it_had() -> None:
    flaps = flapping("decode", 0, 3.0, 4.0, 2.5, 6, workers=4)
    _, calm = simulated(Setup(4, engine=ENGINE), steady(3000, 0.012), "least_load")
    fleet, measured = simulated(Setup(4, engine=ENGINE), steady(3000, 0.012), "least_load", flaps)
    assert len(measured.e2e_s) == 3000
    assert 0 < measured.moved < 6 * 20
    assert measured.figures()["ttft_ms_p90"] < 2 * calm.figures()["ttft_ms_p90"]
    late = sum(1 for ttft_s in measured.ttft_s if ttft_s > 1.0)
    assert late <= measured.moved, "nobody waited for it but those that it had"
    check_empty(fleet)


@pytest.mark.parametrize("name", ["kv_aware", "least_load", "power_of_two"])
def test_a_worker_that_reports_no_load_is_not_overloaded(name: PolicyName) -> None:
    """Its heartbeats report no load, in a fleet that is 70 % busy. Requests that it has not reported still count."""
    lie = [Incident(0.0, "lie", "decode", 0, 0.0)]
    fleet, measured = simulated(Setup(8, engine=ENGINE), steady(3000, 0.0045, output=4), name, lie)
    prompts = computed(fleet)
    assert len(measured.e2e_s) == 3000
    assert prompts[0] < 2 * statistics.fmean(prompts[1:])
    assert measured.figures()["ttft_ms_p99"] < 500


@pytest.mark.parametrize("incident", ["crash", "drain"])
def test_a_run_ends_when_nobody_is_left_and_says_who_was_not_served(incident: Kind) -> None:
    _, measured = simulated(Setup(1, engine=ENGINE), steady(100, 0.1), "round_robin", [Incident(5.0, incident)])
    assert measured.unserved > 0
    assert measured.unserved + len(measured.e2e_s) == measured.arrived == 100
    assert measured.figures()["unserved"] == measured.unserved
    late = [Incident(5.0, incident), Incident(60.0, "add")]
    _, measured = simulated(Setup(1, engine=ENGINE), steady(100, 0.1), "round_robin", late)
    assert (measured.unserved, len(measured.e2e_s)) == (0, 100), "somebody was to come"


LARGE = Setup(96, 96, ENGINE, decode_routers=4, prefill_routers=16, seed=3)


def large(setup: Setup, load: str, incidents: Sequence[Incident] = ()) -> tuple[Fleet, Measured]:
    """Run a load on a fleet whose decode workers may query prefill workers, instead of following them."""
    lengths = Lengths(prefix=256, question=512, answer=32, block=64)
    traffic = (
        conversations(3, 3000, 150.0, 5.0, 4.0, lengths)
        if load == "conversations"
        else shared_prefixes(3, 6000, 400.0, 96, 1.0, replace(lengths, prefix=1024))
    )
    fleet = Fleet(setup, traffic, policy("least_load"), policy("kv_aware", "prefill"), incidents)
    return fleet, fleet.run()


@pytest.mark.parametrize("load", ["conversations", "shared prefixes"])
def test_querying_a_few_prefill_workers_is_as_good_as_following_all_of_them(load: str) -> None:
    """Within 3 % in cached tokens and in TTFT, with few queries a prompt."""
    followed, asked = large(LARGE, load)[1].figures(), large(with_queries(LARGE), load)[1].figures()
    assert asked["cache_hit"] >= 0.97 * followed["cache_hit"]
    for figure in ("ttft_ms_p50", "ttft_ms_p90", "ttft_ms_p99"):
        assert asked[figure] <= 1.03 * followed[figure], figure


def test_questions_are_answered_by_the_living_and_are_few() -> None:
    crashes = [Incident(5.0, "crash", "prefill", at) for at in range(8)]
    fleet, measured = large(with_queries(LARGE), "conversations", crashes)
    routers = fleet.prefills.routers
    assert len(measured.e2e_s) == 3000
    assert 1 <= routers.num_asked / routers.num_chosen < 12
    assert measured.unserved == 0


def test_without_questions_left_prompts_are_served_all_the_same() -> None:
    setup = with_queries(LARGE)
    mute = replace(setup, delays=replace(setup.delays, queries_per_s=0.0))
    fleet, measured = large(mute, "conversations")
    assert len(measured.e2e_s) == 3000
    assert fleet.prefills.routers.num_asked <= LARGE.decode * 32


def test_an_incident_of_a_worker_that_is_not_there_is_refused() -> None:
    known: dict[Role, int] = {"prefill": 0, "decode": 4}
    check(parse("crash decode 3 5", known), known)
    check([*parse("add decode 1 4", known), *parse("crash decode 4 5", known)], known)
    check(parse("flap decode 1 30 10 5 8", known), known)
    with pytest.raises(ValueError, match="crash decode 9 at 5 s: there are 4 by then"):
        check(parse("crash decode 9 5", known), known)
    with pytest.raises(ValueError, match="there are 4"):
        check([*parse("add decode 1 6", known), *parse("crash decode 4 5", known)], known)


def test_workers_of_several_devices_are_as_fast_as_given_or_measured_and_cost_their_devices() -> None:
    speeds = speeds_of("2=1.5, 4=2.5")
    double = engine_on(2, ENGINE, speeds, None)
    assert (double.devices, double.cost.speedup) == (2, FAST.speedup * 1.5)
    measured = engine_on(8, ENGINE, speeds, MockConfig(step_s=1.0))
    assert (measured.devices, measured.cost.step_s, measured.cost.speedup) == (8, 1.0, FAST.speedup)
    for text in ("2", "2=0", "two=2", "2=1.5;4=2"):
        with pytest.raises(typer.BadParameter, match="is not DEVICES=FACTOR"):
            speeds_of(text)
    with pytest.raises(typer.BadParameter, match="the speed of 8 devices is unknown"):
        engine_on(8, ENGINE, speeds, None)
    alone, together = (
        simulated(Setup(1, 1, ENGINE, prefill_engine=engine), steady(50, 1.0))[1].figures()
        for engine in (ENGINE, double)
    )
    assert together["ttft_ms_p50"] < alone["ttft_ms_p50"]
    assert alone["device_s"] == alone["worker_s"]
    assert together["device_s"] == pytest.approx(1.5 * together["worker_s"], rel=0.02)


# --- fit, traces, command line


def lines_of(cost: MockConfig, noise: Callable[[], float] = lambda: 1.0) -> list[dict[str, object]]:
    lines: list[dict[str, object]] = []
    for batch, context in itertools.product((1, 8, 32), (320, 1024)):
        ms = cost.duration_s(0, batch, batch * context) * 1000 * noise()
        lines.append({"figure": "decode step", "label": "compiled", "batch": batch, "context": context, "ms_p50": ms})
    for tokens in (256, 512, 2048):
        work = tokens * cost.prompt_token_s + tokens * (tokens + 1) / 2 * cost.attention_s
        ms = (-(-tokens // 512) * cost.step_s + work) * 1000 * noise()
        lines.append({"figure": "prompt", "label": "compiled", "tokens": tokens, "ms_p50": ms})
    return [*lines, {"figure": "scheduler and bookkeeping", "label": "compiled", "ms_p50": 9.0}]


def test_a_fit_finds_the_constants_that_made_the_lines() -> None:
    cost = MockConfig(step_s=0.012, decode_s=0.0008, context_token_s=5e-7, prompt_token_s=0.0003, attention_s=2e-8)
    found = fit(lines_of(cost))
    for name in ("step_s", "decode_s", "context_token_s", "prompt_token_s", "attention_s"):
        assert getattr(found.cost, name) == pytest.approx(getattr(cost, name), rel=1e-6)
    assert max(found.decode_error, found.prompt_error) < 1e-6
    draw = Random(2)
    noisy = fit(lines_of(cost, lambda: 1 + 0.1 * (draw.random() - 0.5)))
    assert noisy.cost.step_s == pytest.approx(0.012, rel=0.2)
    assert 0.001 < noisy.decode_error < 0.12


def test_a_fit_has_no_negative_constant_and_says_what_it_lacks() -> None:
    fewer = [line for line in lines_of(MockConfig()) if line.get("batch") != 1]
    for line in fewer:
        line["ms_p50"] = {320: 20.0, 1024: 18.0}.get(line.get("context", 0), 50.0)  # longer context, shorter step
    assert fit(fewer).cost.context_token_s == 0
    with pytest.raises(ValueError, match="0 decode steps"):
        fit([])
    other = [{**line, "label": "eager"} for line in lines_of(MockConfig())]
    with pytest.raises(ValueError, match="compiled, eager"):
        fit([*other, *lines_of(MockConfig())])
    assert fit([*other, *lines_of(MockConfig())], "eager").cost.step_s == pytest.approx(MockConfig().step_s)


TRACE = [
    {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
    {"timestamp": 2500, "input_length": 1536, "output_length": 7, "hash_ids": [0, 1, 3]},
]


def test_a_trace_has_its_times_and_only_its_full_blocks(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, TRACE)))
    first, second = trace(path, speed=2.0)
    assert (first.at_s, first.prompt, first.output, len(first.blocks)) == (0.0, 1100, 5, 2)
    assert (second.at_s, second.prompt, second.output, len(second.blocks)) == (1.25, 1536, 7, 3)
    assert first.blocks == second.blocks[:2]
    assert first.session == second.session


def test_synthetic_conversations_repeat_what_was_said() -> None:
    requests = list(conversations(1, 300, 1.0, 5.0, 10.0, LENGTHS))
    assert [r.at_s for r in requests] == sorted(r.at_s for r in requests)
    by_session: dict[str, list[Request]] = {}
    for request in requests:
        by_session.setdefault(request.session, []).append(request)
    assert max(len(turns) for turns in by_session.values()) > 5
    for turns in by_session.values():
        for before, after in itertools.pairwise(turns):
            assert after.prompt > before.prompt + before.output
            assert after.blocks[: len(before.blocks)] == before.blocks
    assert len({tuple(turns[0].blocks[:16]) for turns in by_session.values()}) == 1, "one system prompt"


def test_incidents_are_read_and_nonsense_refused() -> None:
    known = {"prefill": 2, "decode": 3}
    assert parse("crash prefill 1 30", known) == [Incident(30.0, "crash", "prefill", 1)]
    assert parse("slow decode 0 5 2.5", known) == [Incident(5.0, "slow", "decode", 0, 2.5)]
    assert parse("add decode 2 7", known) == [Incident(7.0, "add", "decode")] * 2
    assert [(i.at_s, i.kind, i.worker) for i in parse("flap decode 1 10 4 1 2", known)] == [
        (10.0, "crash", 1),
        (11.0, "add", 0),
        (15.0, "crash", 3),
        (16.0, "add", 0),
    ]
    for text in ("", "crash decode 0", "crash nobody 0 1", "burn decode 0 1", "slow decode 0 1", "drain decode 0 1 2"):
        with pytest.raises(ValueError, match="is not one of"):
            parse(text, known)


def test_the_command_prints_a_row_and_a_line_for_each_policy_and_draws(tmp_path: Path) -> None:
    path, out, plot = tmp_path / "trace.jsonl", tmp_path / "lines.jsonl", tmp_path / "plot.png"
    path.write_text(
        "\n".join(
            json.dumps({**TRACE[0], "timestamp": 100 * i, "hash_ids": [0, 2 * i + 1, 2 * i + 2]}) for i in range(40)
        )
    )
    command = [sys.executable, "-m", "bench.simulate", "--trace", str(path), "--prefill", "2", "--decode", "1"]
    command += ["--speedup", "10", "--policy", "kv_aware@temperature=0.05", "--policy", "round_robin/least_load"]
    command += ["--incident", "crash prefill 0 1", "--json", str(out), "--plot", str(plot)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert [row.split()[0] for row in done.stdout.splitlines()] == [
        "ms",
        "kv_aware@temperature=0.05",
        "round_robin/least_load",
    ]
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["requests"] for line in lines] == [40, 40]
    assert lines[0]["cache_hit"] >= lines[1]["cache_hit"] > 0
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("--trace none", "--trace none: No such file or directory"),
        ("--trace empty", "empty has no requests"),
        ("--trace wrong", "wrong:1 is not a request of a trace"),
        ("--fit none", "--fit none: No such file or directory"),
        ("--fit empty", "0 decode steps and 0 prompts"),
        ("--fit wrong", "a line is not of bench.engine"),
        ("--prefill-fit empty", "--prefill-fit empty"),
        ("--plot none/a.png", "the directory none does not exist"),
        ("--plot a.doc", "does not end in .png or .svg"),
        ("--json none/a.jsonl", "the directory none does not exist"),
        ("--skew nan", "--skew"),
        ("--slo-ttft-ms nan", "--slo-ttft-ms nan is not a finite number"),
        ("--skew 1e9", "Invalid value for '--skew'"),
        ("--rate inf", "--rate inf is not a finite number"),
        ("--think-s 0", "Invalid value for '--think-s'"),
        ("--kv-bytes -1", "Invalid value for '--kv-bytes'"),
    ],
)
def test_wrong_options_are_refused_in_a_line(
    options: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command ended with a traceback, for a plot's folder even after all runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "empty").touch()
    (tmp_path / "wrong").write_text('{"figure": "prompt"}\n{"figure": "decode step"}\n{"figure": "decode step"}\n')
    app = typer.Typer()
    app.command()(main)
    done = CliRunner().invoke(app, options.split())
    assert done.exit_code == 2, done.output
    assert reason in done.output
