"""Blocks of routed requests are kept until they expire, there are too many, or the instance leaves."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from components.routing.approximate_index import BLOCKS_PER_PROMPT, ApproximateIndex
from components.wire.tokens import PromptBlocks, pack_tokens, seed_hash
from tests.components.routing.test_kv_index import INSTANCES, PROMPTS, brute_force, instances, prompts

TTL_S = 10.0


class ApproximateMachine(RuleBasedStateMachine):
    """Compares the index with a dictionary of expiry times."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.index = ApproximateIndex(TTL_S, 1000, lambda: self.now)
        self.expires: dict[str, dict[bytes, float]] = {}

    @rule(name=instances, prompt=prompts)
    def route(self, name: str, prompt: list[bytes]) -> None:
        self.index.routed(name, prompt)
        self.expires.setdefault(name, {}).update(dict.fromkeys(prompt, self.now + TTL_S))

    @rule(seconds=st.floats(0, 12))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(name=instances)
    def remove(self, name: str) -> None:
        self.index.remove(name)
        self.expires.pop(name, None)

    @invariant()
    def it_finds_what_has_not_expired(self) -> None:
        held = {
            name: {block for block, until in blocks.items() if until > self.now}
            for name, blocks in self.expires.items()
        }
        for prompt in PROMPTS:
            assert self.index.find(prompt) == brute_force(held, prompt)


TestApproximate = ApproximateMachine.TestCase
TestApproximate.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


def test_past_its_bound_the_oldest_is_forgotten_from_its_end() -> None:
    index = ApproximateIndex(TTL_S, 6, lambda: 0.0)
    long, other = PROMPTS[3], PROMPTS[7]
    index.routed("a", long)
    index.routed("b", other)
    assert len(index) == 6
    assert index.find(long) == {"a": 3}
    assert index.find(other) == {"b": 3}
    index.routed("a", long[:1])
    index.routed("c", PROMPTS[1])
    assert index.find(long) == {"a": 1, "c": 2}, "what was asked for again is kept"


def test_all_instances_expire_and_leave_nothing() -> None:
    clock = [0.0]
    index = ApproximateIndex(TTL_S, 100, lambda: clock[0])
    for name in INSTANCES:
        index.routed(name, PROMPTS[3])
    clock[0] = TTL_S
    assert index.find(PROMPTS[3]) == {}
    assert (len(index), index._index.num_blocks) == (0, 0)


def test_only_the_first_blocks_of_a_long_prompt_are_hashed_and_kept() -> None:
    """All blocks were hashed: 1,000,000 tokens blocked the event loop for 0.5 s."""
    index = ApproximateIndex(TTL_S, clock=lambda: 0.0)
    blocks = PromptBlocks(pack_tokens(range(BLOCKS_PER_PROMPT * 64)), seed_hash("m"))(16)
    index.routed("a", blocks)
    assert (len(index), len(blocks._made)) == (BLOCKS_PER_PROMPT, BLOCKS_PER_PROMPT)
    assert index.find(blocks) == {"a": BLOCKS_PER_PROMPT}
    assert len(blocks._made) == BLOCKS_PER_PROMPT + 1
