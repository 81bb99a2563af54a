"""Random events of many requests on a small pool: pages always add up, tokens are always right."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from msgspec import structs

from components.wire.sampling import SamplingParams, branch_seed
from engine.core.engine_core import EngineCore
from engine.model.load import LoadedModel
from engine.ports import EngineRequest, Exposed, Phase, StepOutput
from engine.runner.step_runner import Launched
from tests.engine.mock_engine import make_mock
from tests.engine.tiny_engine import (
    GENERATING,
    Seen,
    alone,
    check_pages,
    make_engine,
    page_bytes,
    prefilled,
    prompt,
    read_page,
    run,
    write_page,
)

pytestmark = pytest.mark.usefixtures("pipeline")

PROMPTS = (
    prompt(1),
    prompt(15),
    prompt(16),
    prompt(33),
    prompt(33) + prompt(20, start=3),  # shares two pages with the last one
    prompt(64, start=2),
    prompt(64, start=2) + prompt(1),
    prompt(90, start=2),
)
SAMPLINGS = (
    SamplingParams(max_tokens=1, temperature=0),
    SamplingParams(max_tokens=20, temperature=0),
    SamplingParams(max_tokens=70, temperature=0, ignore_eos=True),
    SamplingParams(max_tokens=40, temperature=1.0, top_p=0.9, seed=5, ignore_eos=True),
    SamplingParams(max_tokens=20, temperature=1.0, seed=6, ignore_eos=True, frequency_penalty=0.5, n=3),
)
MAX_CONTEXT = 192
SMALL_POOL = {"max_running": 5, "max_step_tokens": 24, "reserve_tokens": 8, "max_context": MAX_CONTEXT}
PAGES_OF = {16: 12, 32: 7, 64: 4, 128: 2}  # by page size: room for a request of the longest context, or little more
ROOMY = {"num_pages": 40, "max_context": MAX_CONTEXT}  # for the same request alone: nothing is preempted
GARBAGE = b"\x3f"


Right = Callable[[Sequence[int], SamplingParams], list[int]]  # the right tokens of a request


def make_machine(make: Callable[..., EngineCore], right: Right, sizes: Sequence[int]) -> type[RuleBasedStateMachine]:
    """Make a state machine with an engine from `make(page_size=..., ...)`."""

    @cache
    def pages_of(which: int, page_size: int) -> list[bytes]:
        engine = make(page_size=page_size, **ROOMY)
        computed = prefilled(engine, "r", PROMPTS[which], SAMPLINGS[0])
        return [read_page(engine, page) for page in computed.pages]

    @cache
    def expected(which: int, how: int, branch: int = 0) -> list[int]:
        one = structs.replace(SAMPLINGS[how], n=1, seed=branch_seed(SAMPLINGS[how].seed, branch))
        return right(PROMPTS[which], one)

    class Machine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.seen = Seen()
            self.asked: dict[str, tuple[int, int, Phase]] = {}
            self.reserved: dict[str, Exposed] = {}  # no KV yet
            self.exposed: dict[str, Exposed] = {}  # abandoned, not released: a late write may come
            self.prefills: set[str] = set()  # computed or cancelled, not released
            self.queued: set[str] = set()  # DECODE, without pages yet
            self.over: set[str] = set()  # cancelled before it ended
            self.cancelled: set[str] = set()  # some branches may not have ended
            self.first: dict[str, list[int]] = {}  # tokens from `deliver`
            self.dropped: dict[tuple[str, int], int] = {}  # tokens of branches that were cancelled alone

        @initialize(page_size=st.sampled_from(sizes))
        def start(self, page_size: int) -> None:
            self.page_size = page_size
            self.engine = make(page_size=page_size, num_pages=PAGES_OF[page_size], **SMALL_POOL)
            _take_time(self.engine)

        @rule(
            which=st.integers(0, len(PROMPTS) - 1),
            how=st.integers(0, len(SAMPLINGS) - 1),
            phase=st.sampled_from(GENERATING),
            priority=st.integers(0, 1),
        )
        def submit(self, which: int, how: int, phase: Phase, priority: int) -> None:
            name = f"r{len(self.asked)}"
            self.asked[name] = (which, how, phase)
            if phase is Phase.DECODE:
                self.queued.add(name)
            self.engine.submit(EngineRequest(name, PROMPTS[which], SAMPLINGS[how], phase, priority=priority))

        @rule(times=st.integers(1, 12))
        def step(self, times: int) -> None:
            for _ in range(times):
                self._step()

        @rule(times=st.integers(1, 4), data=st.data())
        def step_while_others_ask(self, times: int, data: st.DataObject) -> None:
            for _ in range(times):
                for said in self.engine.stepping():
                    if isinstance(said, StepOutput):
                        self._take(said)
                    else:
                        self._take_reserved(said.reserved)
                        self._ask(data)

        @precondition(lambda self: self.reserved)
        @rule(data=st.data())
        def deliver(self, data: st.DataObject) -> None:
            name = data.draw(st.sampled_from(sorted(self.reserved)))
            self._deliver(name)

        @precondition(lambda self: self.reserved)
        @rule(data=st.data(), spoilt=st.booleans(), has_token=st.booleans())
        def recompute(self, data: st.DataObject, spoilt: bool, has_token: bool) -> None:
            """`has_token`: the client has the first token, if another one follows."""
            name = data.draw(st.sampled_from(sorted(self.reserved)))
            self.exposed[name] = self.reserved.pop(name)
            if spoilt:
                self._spoil(self.exposed[name])
            which, how, _ = self.asked[name]
            first_token = expected(which, how)[0]
            continues = self.engine.continues(len(PROMPTS[which]), SAMPLINGS[how], first_token)
            if has_token and SAMPLINGS[how].n == 1 and continues:
                self.first[name] = [first_token]
                self.engine.recompute(name, first_token)
            else:
                self.engine.recompute(name)

        @precondition(lambda self: self.queued)
        @rule(data=st.data())
        def recompute_what_has_no_pages_yet(self, data: st.DataObject) -> None:
            name = data.draw(st.sampled_from(sorted(self.queued)))
            self.queued.remove(name)
            self.engine.recompute(name)

        @precondition(lambda self: self.asked)
        @rule(data=st.data())
        def cancel(self, data: st.DataObject) -> None:
            name = data.draw(st.sampled_from(sorted(self.asked)))
            if name in self.reserved:
                self.exposed[name] = self.reserved.pop(name)
            self.queued.discard(name)
            self.engine.cancel(name)
            self.cancelled.add(name)
            if name not in self.seen.finish and name not in self.prefills:
                self.over.add(name)
            if self.asked[name][2] is Phase.PREFILL:  # its pages may be exposed although no chunk was told yet
                self.prefills.add(name)

        @precondition(lambda self: self._branched())
        @rule(data=st.data(), branch=st.integers(0, 2))
        def cancel_branch(self, data: st.DataObject, branch: int) -> None:
            name = data.draw(st.sampled_from(self._branched()))
            n = SAMPLINGS[self.asked[name][1]].n
            others = [i for i in range(n) if i != branch and (name, i) not in self.dropped]
            if others:  # else it is `cancel`
                self.engine.cancel(name, branch)
                self.dropped.setdefault((name, branch), len(self._made(name, branch)))

        @precondition(lambda self: self.exposed)
        @rule(data=st.data())
        def write_late(self, data: st.DataObject) -> None:
            self._spoil(self.exposed[data.draw(st.sampled_from(sorted(self.exposed)))])

        @precondition(lambda self: self.exposed or self.prefills)
        @rule(data=st.data(), again=st.booleans())
        def release(self, data: st.DataObject, again: bool) -> None:
            name = data.draw(st.sampled_from(sorted([*self.exposed, *self.prefills])))
            self.exposed.pop(name, None)
            self.prefills.discard(name)
            self.engine.release(name)
            if again:
                self.engine.release(name)

        @invariant()
        def pages_add_up(self) -> None:
            check_pages(self.engine)
            holders = self.engine._memory.pool._holders
            for kept in [*self.reserved.values(), *self.exposed.values()]:
                fresh = kept.pages[kept.num_computed // self.page_size :]
                assert all(holders[page] == 1 for page in fresh), "an exposed page was given to another"

        @invariant()
        def tokens_are_right_so_far(self) -> None:
            for name, (which, how, _) in self.asked.items():
                made = self._made(name)
                wanted = expected(which, how)
                assert made == wanted[: len(made)]
                for branch in range(1, SAMPLINGS[how].n):
                    told = self.seen.branches.get((name, branch), [])
                    assert told == expected(which, how, branch)[: len(told)]
                if name in self.seen.finish:
                    assert made == wanted
            for (name, branch), count in self.dropped.items():
                assert len(self._made(name, branch)) == count, "a branch that was cancelled went on"

        def teardown(self) -> None:
            for name in list(self.reserved):
                self._deliver(name)
            for _ in range(3000):
                for name in [*self.exposed, *self.prefills]:
                    self.engine.release(name)
                self.exposed.clear()
                self.prefills.clear()
                for name in list(self.reserved):
                    self._deliver(name)
                if not self.engine.has_work():
                    break
                self._step()
            stats = self.engine.step().stats
            assert (stats.num_running, stats.num_waiting, stats.num_held, stats.held_pages) == (0, 0, 0, 0)
            self.tokens_are_right_so_far()
            for name, (which, how, phase) in self.asked.items():
                if phase is not Phase.PREFILL:
                    over = name in self.over or name in self.seen.finish or (name, 0) in self.dropped
                    assert over, f"{name} never ended"
                    wanted = range(1, 1 if name in self.cancelled else SAMPLINGS[how].n)
                    for branch in (b for b in wanted if (name, b) not in self.dropped):
                        assert self.seen.branches[name, branch] == expected(which, how, branch)

        def _branched(self) -> list[str]:
            return sorted(
                n for n, (_, how, phase) in self.asked.items() if SAMPLINGS[how].n > 1 and phase is not Phase.PREFILL
            )

        def _made(self, name: str, branch: int = 0) -> list[int]:
            if branch:
                return self.seen.branches.get((name, branch), [])
            return self.first.get(name, []) + self.seen.tokens.get(name, [])

        def _ask(self, data: st.DataObject) -> None:
            """Apply a rule above between the launch and the end of a step."""
            able = {"submit": True, "deliver": self.reserved, "recompute": self.reserved, "cancel": self.asked}
            able |= {"release": self.exposed or self.prefills, "write_late": self.exposed, "nothing": True}
            match data.draw(st.sampled_from([name for name, can in able.items() if can])):
                case "submit":
                    which, how = (data.draw(st.integers(0, len(all_) - 1)) for all_ in (PROMPTS, SAMPLINGS))
                    self.submit(which, how, data.draw(st.sampled_from(GENERATING)), data.draw(st.integers(0, 1)))
                case "deliver":
                    self.deliver(data)
                case "recompute":
                    self.recompute(data, data.draw(st.booleans()), data.draw(st.booleans()))
                case "cancel":
                    self.cancel(data)
                case "release":
                    self.release(data, data.draw(st.booleans()))
                case "write_late":
                    self.write_late(data)
            check_pages(self.engine)

        def _take_reserved(self, told: Sequence[Exposed]) -> None:
            for reserved in told:
                self.reserved[reserved.request_id] = reserved
                self.queued.remove(reserved.request_id)

        def _step(self) -> None:
            self._take(self.engine.step())

        def _take(self, output: StepOutput) -> None:
            self.seen.take(output)
            assert not output.failed
            self._take_reserved(output.reserved)
            for computed in output.computed:
                which, how, _ = self.asked[computed.request_id]
                self.prefills.add(computed.request_id)
                if computed.first_token is not None:
                    assert computed.first_token == expected(which, how)[0]
            check_pages(self.engine)

        def _deliver(self, name: str) -> None:
            reserved = self.reserved.pop(name)
            which, how, _ = self.asked[name]
            right = pages_of(which, self.page_size)
            for page, data in list(zip(reserved.pages, right, strict=True))[reserved.num_computed // self.page_size :]:
                write_page(self.engine, page, data)
            for output in self.engine.deliver(name, expected(which, how)[0]):
                self.first[name] = output.token_ids
                if output.finish is not None:
                    self.seen.finish[name] = output.finish

        def _spoil(self, reserved: Exposed) -> None:
            for page in reserved.pages[reserved.num_computed // self.page_size :]:
                write_page(self.engine, page, GARBAGE * page_bytes(self.engine))

    return Machine


class Slow:
    """A step that is unfinished at three checks."""

    def __init__(self, step: Launched) -> None:
        self.chunks, self.sample, self.result = step.chunks, step.sample, step.result
        self.left_s = [0.3, 0.2, 0.1]

    def wait_s(self) -> float:
        return self.left_s.pop(0) if self.left_s else 0.0


def _take_time(engine: EngineCore) -> None:
    launch = engine._runner.launch
    engine._runner.launch = lambda chunks: Slow(launch(chunks))  # type: ignore[method-assign]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("model", ["tiny", "windowed"])  # pages before all windows of the latter are released
def test_pages_add_up_and_tokens_are_right_whatever_happens(request: pytest.FixtureRequest, model: str) -> None:
    loaded: LoadedModel = request.getfixturevalue(model)

    def make(page_size: int, **changes: object) -> EngineCore:
        sized = replace(loaded, layout=structs.replace(loaded.layout, page_size=page_size))
        return make_engine(sized, page_size=page_size, **changes)

    run_machine(make, 12, alone_on(loaded))


@pytest.mark.parametrize("window", [None, 40])
def test_pages_add_up_and_tokens_are_right_over_many_more_runs_with_the_mock(
    tmp_path: Path, window: int | None
) -> None:
    make = partial(make_mock, tmp_path, {"window": window})
    run_machine(make, 60, alone_of(make))


def alone_on(loaded: LoadedModel) -> Right:
    """Compute each request once for all tests of a process, without a pipeline, drafts or pages beside the pool."""
    return partial(alone, loaded, **ROOMY, pipeline="off")


def alone_of(make: Callable[..., EngineCore]) -> Right:
    def right(token_ids: Sequence[int], sampling: SamplingParams) -> list[int]:
        return run(make(page_size=16, **ROOMY), [EngineRequest("alone", token_ids, sampling)]).tokens["alone"]

    return right


def run_machine(
    make: Callable[..., EngineCore],
    max_examples: int,
    right: Right,
    sizes: Sequence[int] = tuple(sorted(PAGES_OF)),
) -> None:
    run_state_machine_as_test(
        make_machine(make, right, sizes),
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
