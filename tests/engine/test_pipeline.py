"""A step is planned while another is in flight, with assumptions that may prove wrong."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from components.wire.layout import KvLayout, KvRegion
from components.wire.sampling import SamplingParams
from engine.core.engine_core import EngineCore
from engine.model.load import LoadedModel
from engine.ports import EngineRequest, FinishReason, Phase, StepOutput
from engine.runner.step_runner import StepFailed
from engine.runner.torch_runner import TorchRunner, TorchStep
from engine.sampling.device_sampler import DeviceSampler
from engine.scheduler.request import Chunk
from tests.device import TESTED
from tests.engine.tiny_engine import (
    GENERATING,
    Seen,
    alone,
    check_pages,
    greedy,
    make_engine,
    prompt,
    run,
    run_until_idle,
    small,
)

EOS = 5
PAGE = 16


class Device:
    """Records its calls, and the pages into which it may write."""

    takes_cpu = False
    forward_kind = ""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.flying: list[DeviceStep] = []
        self.answers: dict[str, list[int]] = {}  # draws by request and number of tokens; else a 7
        self.failing: dict[int, str] = {}  # number of a step: where it fails
        self.rows: list[list[str]] = []  # ids of the requests in each step
        self.copied: list[tuple[int, int]] = []

    def launch(self, chunks: Sequence[Chunk]) -> "DeviceStep":
        number = len(self.rows)
        self.rows.append([chunk.request.id for chunk in chunks])
        self.record("launch", number)
        assert len(self.flying) <= 1
        assert all(step.sampled for step in self.flying), "their tokens are needed on the device"
        ahead = {chunk.request for step in self.flying for chunk in step.chunks if chunk.samples}
        assert all(chunk.ahead == (chunk.request in ahead) for chunk in chunks)
        self.flying.append(DeviceStep(self, number, list(chunks)))
        return self.flying[-1]

    def copy_pages(self, moves: Sequence[tuple[int, int]]) -> None:
        assert self.written.isdisjoint(source for source, _ in moves), "what is copied has not been computed"
        self.copied += moves

    @property
    def written(self) -> set[int]:
        """Pages that steps in flight write."""
        return {page for step in self.flying for page in step.pages}

    def record(self, what: str, number: int) -> None:
        self.calls.append(f"{what} {number}")
        if self.failing.get(number) == what:
            raise StepFailed("out of memory")


class DeviceStep:
    def __init__(self, device: Device, number: int, chunks: list[Chunk]) -> None:
        self.device = device
        self.number = number
        self.chunks = chunks
        self.sampled = False
        self.left_s = [0.2, 0.1]  # as long as it takes
        self.pages = {c.request.pages[at // PAGE] for c in chunks for at in range(c.start, c.end)}

    def sample(self) -> None:
        self.sampled = True
        assert self.device.flying == [self], "the step before has landed"
        assert all(len(c.request.tokens) == c.end for c in self.chunks if c.samples and not c.dropped)
        try:
            self.device.record("sample", self.number)
        except StepFailed:
            self.device.flying.remove(self)
            raise

    def wait_s(self) -> float:
        assert self.device.flying[0] is self
        return self.left_s.pop(0) if self.left_s else 0.0

    def result(self) -> Sequence[Sequence[int]]:
        assert self.device.flying[0] is self
        self.device.flying.remove(self)
        self.device.record("result", self.number)
        return [(self.draw(chunk),) if chunk.samples else () for chunk in self.chunks]

    def draw(self, chunk: Chunk) -> int:
        answer = self.device.answers.get(chunk.request.id, [])
        number = chunk.end - chunk.request.prompt_len
        return answer[number] if number < len(answer) else 7


@pytest.fixture
def device() -> Device:
    return Device()


def core_on(device: Device, **changes: object) -> EngineCore:
    config = small(**{"pipeline": "on", **changes})
    layout = KvLayout(model="m", dtype="float32", page_size=PAGE, layers=1, kv_heads=1, head_dim=8)
    return EngineCore(
        runner=device,
        config=config,
        region=KvRegion(0, config.num_pages or 0, layout, "cpu"),
        max_context=512,
        vocab_size=128,
        eos_token_ids=frozenset({EOS}),
    )


@pytest.fixture
def core(device: Device) -> EngineCore:
    return core_on(device)


def test_a_step_is_launched_before_the_one_before_is_waited_for_and_drawn_after(
    core: EngineCore, device: Device
) -> None:
    core.submit(EngineRequest("r", prompt(60), greedy(3)))
    seen = run_until_idle(core)
    assert seen.tokens["r"] == [7, 7, 7]
    assert device.calls[:8] == [
        *("launch 0", "sample 0"),
        *("launch 1", "result 0", "sample 1"),
        *("launch 2", "result 1", "sample 2"),
    ]
    assert [(s.prompt_tokens, s.decode_tokens) for s in seen.steps] == [(0, 0), (48, 0), (12, 1), (0, 1), (0, 1)]


def test_without_a_pipeline_each_step_lands_before_the_next_one_is_planned(device: Device) -> None:
    core = core_on(device, pipeline="off")
    core.submit(EngineRequest("r", prompt(20), greedy(2)))
    run_until_idle(core)
    assert device.calls == ["launch 0", "sample 0", "result 0", "launch 1", "sample 1", "result 1"]


@pytest.mark.parametrize(
    ("pipeline", "takes_cpu", "pipelined"),
    [("auto", True, False), ("auto", False, True), ("on", True, True), ("off", False, False)],
)
def test_by_default_steps_are_pipelined_where_the_device_is_not_the_cpu(
    device: Device, pipeline: str, takes_cpu: bool, pipelined: bool
) -> None:
    device.takes_cpu = takes_cpu
    core = core_on(device, pipeline=pipeline)
    core.submit(EngineRequest("r", prompt(20), greedy(9)))
    core.step()
    assert bool(device.flying) == pipelined


def test_a_length_that_is_known_costs_no_row_too_many(core: EngineCore, device: Device) -> None:
    core.submit(EngineRequest("full", prompt(5), greedy(4)))
    core.submit(EngineRequest("prefill", prompt(5, start=1), greedy(4), Phase.PREFILL))
    run_until_idle(core)
    rows = [name for step in device.rows for name in step]
    assert (rows.count("full"), rows.count("prefill")) == (4, 1)


def test_what_is_drawn_behind_an_end_in_flight_is_dropped(core: EngineCore, device: Device) -> None:
    device.answers = {"ends": [9, 10, EOS, 11, 12]}
    core.submit(EngineRequest("ends", prompt(5), greedy(30)))
    core.submit(EngineRequest("goes on", prompt(5, start=1), greedy(8)))
    seen = run_until_idle(core)
    assert (seen.tokens["ends"], seen.finish["ends"]) == ([9, 10, EOS], FinishReason.STOP)
    assert sum("ends" in step for step in device.rows) == 4, "it was computed once more, for nothing"
    assert seen.tokens["goes on"] == [7] * 8
    assert core.step().stats.held_pages == 0


def test_pages_of_an_ended_request_are_given_to_nobody_before_its_last_step_has_landed(device: Device) -> None:
    core = core_on(device, num_pages=4, reserve_tokens=0)
    device.answers = {"ends": [9, EOS]}
    core.submit(EngineRequest("ends", prompt(31), greedy(30)))
    core.step()
    core.submit(EngineRequest("waits", prompt(60, start=1), greedy(3), Phase.DECODE))
    output = core.step()
    while not output.tokens or output.tokens[0].finish is None:
        output = core.step()
    assert device.flying[0].pages == {2}, "a page that it got for the token behind its end"
    assert output.stats.held_pages == 3
    output = core.step()  # the step in flight lands
    assert (output.reserved, output.stats.held_pages) == ([], 0)
    (reserved,) = core.step().reserved
    assert sorted(reserved.pages) == [0, 1, 2, 3]
    check_pages(core)


@pytest.mark.parametrize("steps", range(1, 6))
def test_a_request_cancelled_in_flight_says_nothing_more_and_leaves_no_page(
    core: EngineCore, device: Device, steps: int
) -> None:
    core.submit(EngineRequest("r", prompt(60), greedy(30, n=3)))
    core.submit(EngineRequest("prefill", prompt(60, start=1), greedy(30), Phase.PREFILL))
    core.submit(EngineRequest("other", prompt(5, start=2), greedy(12)))
    seen = Seen()
    for _ in range(steps):
        seen.take(core.step())
    assert device.flying
    before = len(seen.tokens.get("r", [])), len(seen.computed.get("prefill", []))
    core.cancel("r")
    core.cancel("prefill")
    core.release("prefill")
    check_pages(core)
    core.submit(EngineRequest("r", prompt(9, start=3), greedy(2)))  # the id is free, even if a step has it
    device.answers = {"r": [50, 51]}
    run_until_idle(core, seen)
    assert (len(seen.tokens["r"]) - 2, len(seen.computed.get("prefill", []))) == before
    assert seen.tokens["r"][-2:] == [50, 51]
    assert seen.tokens["other"] == [7] * 12
    assert core.step().stats.held_pages == 0


def test_nobody_is_preempted_while_in_flight(device: Device) -> None:
    core = core_on(device, num_pages=8, reserve_tokens=0)
    for i in range(4):
        core.submit(EngineRequest(f"r{i}", prompt(17, start=i), greedy(60)))
    seen = Seen()
    preemptions = 0
    while core.has_work():
        launched = len(device.rows)
        seen.take(core.step())
        check_pages(core)
        if seen.steps[-1].preemptions > preemptions:
            preemptions = seen.steps[-1].preemptions
            calls = device.calls[device.calls.index(f"launch {launched - 1}") :]
            assert calls.index(f"result {launched - 1}") < calls.index(f"launch {launched}")
    assert preemptions > 1
    assert all(tokens == [7] * 60 for tokens in seen.tokens.values())


def test_a_reservation_is_computed_here_while_a_step_is_in_flight(core: EngineCore, device: Device) -> None:
    core.submit(EngineRequest("other", prompt(5), greedy(20)))
    core.submit(EngineRequest("d", prompt(20, start=1), greedy(3), Phase.DECODE))
    seen = Seen()
    seen.take(core.step())
    assert device.flying
    exposed = set(seen.reserved["d"].pages)
    core.recompute("d")
    while "d" not in seen.finish:
        seen.take(core.step())
        assert not exposed & device.written
        check_pages(core)
    assert seen.tokens["d"] == [7, 7, 7]
    core.release("d")
    run_until_idle(core, seen)
    assert core.step().stats.held_pages == 0


@pytest.mark.parametrize(
    ("num_tokens", "changes", "token", "continues"),
    [
        (20, {}, 9, True),
        (20, {"max_tokens": 1}, 9, False),
        (20, {"stop_token_ids": (9,)}, 9, False),
        (20, {}, -1, False),
        (20, {}, 1 << 30, False),
    ],
)
def test_an_answer_has_more_tokens_unless_the_first_one_ends_it(
    core: EngineCore, num_tokens: int, changes: dict[str, Any], token: int, continues: bool
) -> None:
    sampling = greedy(**{"max_tokens": 4, "ignore_eos": True, **changes})
    assert core.continues(num_tokens, sampling, token) is continues
    assert not core.continues(core.max_context - 1, sampling, token)


def test_a_first_token_that_the_client_has_is_not_drawn_again(core: EngineCore, device: Device) -> None:
    core.submit(EngineRequest("d", prompt(20, start=1), greedy(4), Phase.DECODE))
    seen = Seen()
    seen.take(core.step())
    core.recompute("d", 9)
    run_until_idle(core, seen)
    assert seen.tokens["d"] == [7, 7, 7], "three of four"
    core.release("d")
    run_until_idle(core, seen)
    assert core.step().stats.held_pages == 0


def test_a_delivered_request_joins_behind_the_step_in_flight(core: EngineCore, device: Device) -> None:
    core.submit(EngineRequest("other", prompt(5), greedy(20)))
    core.submit(EngineRequest("d", prompt(20, start=1), greedy(4, n=2), Phase.DECODE))
    seen = Seen()
    seen.take(core.step())
    assert device.flying
    (first,) = core.deliver("d", 9)
    assert len(device.copied) == 1
    run_until_idle(core, seen)
    assert [*first.token_ids, *seen.tokens["d"]] == [9, 7, 7, 7]
    assert seen.branches["d", 1] == [7] * 4
    assert len(seen.tokens["other"]) == 20


@pytest.mark.parametrize("pipeline", ["on", "off"])
def test_pages_are_reserved_while_a_step_is_waited_for(device: Device, pipeline: str) -> None:
    core = core_on(device, pipeline=pipeline)
    core.submit(EngineRequest("other", prompt(5), greedy(20)))
    core.submit(EngineRequest("early", prompt(20, start=1), greedy(3), Phase.DECODE))
    seen = Seen()
    reserved: list[list[str]] = []

    while not reserved:
        for part in core.stepping():
            if isinstance(part, StepOutput):
                seen.take(part)
                continue
            reserved.append([r.request_id for r in part.reserved])
            assert device.flying
            assert part.wait_s in {0.1, 0.2}
            if part.wait_s == 0.2:
                core.submit(EngineRequest(f"late {len(reserved)}", prompt(20, start=2), greedy(3), Phase.DECODE))
    early = [["early"], []][pipeline == "on"]  # else the step that reserved it had none to wait for
    assert reserved == [early, ["late 1"]]
    assert seen.reserved.keys() == {"early"} - {*early}, "each is reported once"
    run_until_idle(core, seen)
    assert seen.tokens["other"] == [7] * 20


def test_a_request_may_end_while_two_steps_of_it_are_under_way(core: EngineCore, device: Device) -> None:
    core.submit(EngineRequest("goes", prompt(20), greedy(20)))
    core.submit(EngineRequest("stays", prompt(20, start=1), greedy(20)))
    seen = Seen()
    for _ in range(3):
        seen.take(core.step())
    before = len(seen.tokens["goes"])

    for part in core.stepping():
        if isinstance(part, StepOutput):
            seen.take(part)
            continue
        assert len(device.flying) == 2
        core.cancel("goes")
        core.submit(EngineRequest("next", prompt(20, start=2), greedy(2), Phase.DECODE))
        check_pages(core)
        core.cancel("next")
    run_until_idle(core, seen)
    assert len(seen.tokens["goes"]) == before
    assert seen.tokens["stays"] == [7] * 20
    assert core.step().stats.held_pages == 0


@pytest.mark.parametrize("where", ["launch", "sample", "result"])
def test_a_step_that_fails_beside_another_in_flight_fails_its_own_requests(
    core: EngineCore, device: Device, where: str
) -> None:
    """`ends` is over when step 3 lands; `late` comes with step 4. Step 3 fails; the one behind it was planned with both."""
    device.failing = {3: where}
    device.answers = {"ends": [9, 9, EOS]}
    core.submit(EngineRequest("ends", prompt(5), greedy(30)))
    core.submit(EngineRequest("r", prompt(5, start=1), greedy(30)))
    seen = Seen()
    for _ in range(3):
        seen.take(core.step())
    assert len(device.rows) == 3
    if where != "result":
        core.submit(EngineRequest("late", prompt(5, start=2), greedy(3), Phase.DECODE))
        seen.take(core.step())
        assert seen.reserved.keys() == {"late"}
        core.deliver("late", 7)
    else:
        seen.take(core.step())
        core.submit(EngineRequest("late", prompt(5, start=2), greedy(3)))
    run_until_idle(core, seen)
    assert seen.tokens["ends"] == [9, 9, EOS], "its last token was drawn before"
    assert seen.finish["ends"] is FinishReason.STOP
    assert seen.tokens["r"] == [7, 7, 7]
    assert seen.failed.keys() == {"r"}
    assert seen.finish["late"] is FinishReason.LENGTH
    assert core.step().stats.held_pages == 0


def test_a_step_in_flight_is_work(core: EngineCore, device: Device) -> None:
    """Otherwise a loop would sleep, and return its tokens only with the next request."""
    core.submit(EngineRequest("r", prompt(5), greedy(1)))
    assert not core.step().tokens
    assert core.has_work()
    core.cancel("r")
    assert core.has_work()
    core.step()
    assert not device.flying
    assert not core.has_work()


def test_an_end_that_a_mask_or_a_penalty_decides_is_drawn_from_all_tokens_before(tiny: LoadedModel) -> None:
    """Penalties need the latest token, which is on the host at the draw, but not at the planning."""
    sampling = greedy(40, ignore_eos=True, presence_penalty=2.0, frequency_penalty=2.0, logprobs=2)
    seen = run(make_engine(tiny, pipeline="on"), [EngineRequest("r", prompt(20), sampling)])
    assert seen.tokens["r"] == alone(tiny, prompt(20), sampling, pipeline="off")
    assert len(seen.logprobs["r"]) == 40


class NoWaiting(TorchFunctionMode):
    """Refuses operations that wait for the device, or copy to it from memory that is not pinned."""

    REFUSED = {
        *(torch.tensor, torch.nonzero, torch.masked_select, torch.Tensor.nonzero, torch.Tensor.masked_select),
        *(torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu, torch.Tensor.cuda),
        *(torch.Tensor.__bool__, torch.Tensor.__int__, torch.Tensor.__float__, torch.Tensor.__index__),
    }

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # with a device, arrays over memory of the host are how tables are filled
        is_hosts = func is torch.Tensor.numpy and TESTED["device"] != "cpu" and args[0].device.type == "cpu"
        assert func not in self.REFUSED or is_hosts, f"{func} waits for the device"
        if func in {torch.Tensor.__getitem__, torch.Tensor.__setitem__}:
            indices = args[1] if isinstance(args[1], tuple) else (args[1],)
            assert not any(isinstance(index, list) for index in indices), "a list is copied to the device"
            assert not any(isinstance(index, torch.Tensor) and index.dtype == torch.bool for index in indices)
        return func(*args, **kwargs or {})


def test_nothing_waits_for_the_device_between_launch_and_result(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU waits cost nothing, but a device would idle."""
    watched: list[str] = []

    def watch(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def method(*args: Any) -> Any:
            watched.append(name)
            with NoWaiting():
                return original(*args)

        monkeypatch.setattr(owner, name, method)

    watch(TorchRunner, "launch")
    watch(TorchRunner, "copy_pages")
    watch(TorchStep, "sample")
    interpreted = DeviceSampler._launch

    def launch(*args: Any) -> None:
        with torch._C.DisableTorchFunction():  # the interpreter does wait
            interpreted(*args)

    monkeypatch.setattr(DeviceSampler, "_launch", launch)
    everything: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "n": 3},
        {"temperature": 0, "presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
        {"logit_bias": ((9, 5.0),), "logprobs": 3, "prompt_logprobs": 2},
        {"min_tokens": 3, "stop_token_ids": (9, 40)},
    ]
    engine = make_engine(tiny, pipeline="on")
    engine._runner.sampler = DeviceSampler(tiny.device, block=128)  # type: ignore[attr-defined]
    for i, how in enumerate(everything):
        params = SamplingParams(**{"max_tokens": 4, "ignore_eos": True, **how})
        engine.submit(EngineRequest(f"r{i}", prompt(30 + i, start=i), params))
    engine.submit(EngineRequest("masked", prompt(30, start=9), greedy(4, min_tokens=2), mask=AllowsAll()))
    run_until_idle(engine)
    assert set(watched) == {"launch", "sample", "copy_pages"}


class AllowsAll:
    is_complete = False
    fault: str | None = None

    def fill(self, allowed: npt.NDArray[np.int32]) -> None:
        allowed[:] = -1

    def accept(self, token_id: int) -> None:
        pass

    def allows(self, token_ids: Sequence[int]) -> int:
        return len(token_ids)

    def fork(self) -> "AllowsAll":
        return self


def test_a_mask_is_not_used_after_the_end(tiny: LoadedModel) -> None:
    """The discarded row after an end is drawn without its mask: a completed grammar may raise."""

    class Grammar(AllowsAll):
        over = False

        def fill(self, allowed: npt.NDArray[np.int32]) -> None:
            assert not self.over
            allowed[:] = 0
            allowed[0] = 1 << EOS

        def accept(self, token_id: int) -> None:
            self.over = token_id == EOS

    engine = make_engine(tiny, pipeline="on")
    engine.submit(EngineRequest("other", prompt(9), greedy(12, ignore_eos=True)))
    seen = run(engine, [EngineRequest("r", prompt(20), greedy(9), mask=Grammar())])
    assert seen.tokens["r"] == [EOS]
    assert len(seen.tokens["other"]) == 12


Action = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 70), st.sampled_from(GENERATING)),
    st.tuples(st.just("step"), st.integers(1, 5), st.none()),
    st.tuples(st.sampled_from(["deliver", "recompute", "cancel", "release"]), st.integers(0, 30), st.none()),
)


@settings(max_examples=150, deadline=None)
@given(actions=st.lists(Action, max_size=60), chance=st.randoms(use_true_random=False))
def test_no_page_that_a_step_in_flight_writes_is_ever_another_s(
    actions: list[tuple[str, int, Phase | None]], chance: random.Random
) -> None:
    """It is not reserved for a transfer, cached, or in the block table of another request."""
    device = Device()
    core = core_on(device, num_pages=10, max_running=5, max_step_tokens=24, reserve_tokens=8)
    names: list[str] = []

    def check() -> None:
        check_pages(core)
        pool = core._memory.pool
        assert all(pool._holders[page] == 1 for page in device.written)
        assert not device.written & {p for request in core._scheduler.reserved for p in request.pages}
        assert not device.written & core._memory.prefix._hash_of.keys()

    for action, number, phase in actions:
        name = names[number % len(names)] if names else ""
        match action:
            case "submit":
                names.append(f"r{len(names)}")
                device.answers[names[-1]] = [EOS if chance.random() < 0.1 else 7 for _ in range(60)]
                request = EngineRequest(names[-1], prompt(number, start=number), greedy(60), phase or Phase.FULL)
                core.submit(request)
            case "step":
                for _ in range(number):
                    core.step()
                    check()
            case "deliver":
                core.deliver(name, 7)
            case "recompute":
                core.recompute(name)
            case "cancel":
                core.cancel(name)
            case "release" if name not in {request.id for request in core._scheduler.reserved}:
                core.release(name)
        check()
