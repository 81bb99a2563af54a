"""The kernel under Triton's interpreter, without a GPU, draws the same tokens as the CPU's sampler."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from bench.host_step import Launches, LaunchesOnly
from components.wire.sampling import SamplingParams
from engine.core.engine_core import EngineCore
from engine.device.copies import to_device
from engine.model.load import LoadedModel
from engine.ports import EngineRequest
from engine.sampling import device_sampler
from engine.sampling.device_sampler import DEPTH, DeviceSampler
from engine.sampling.row import NO_TOKEN, Row
from engine.sampling.sampler import HostSampler, choose_sampler
from tests.engine.sampling.reference import make_row
from tests.engine.tiny_engine import make_engine, prompt, run

CPU = torch.device("cpu")
EOS = frozenset({3})
WAYS: dict[str, list[Any]] = {  # the first is that of most rows
    "temperature": [1.0, 0.0, 0.05, 0.6, 2.0, 30.0, 1e-15],
    "top_p": [1.0, 0.01, 0.5, 0.95],
    "top_k": [0, 1, 5, 20, 300],
    "min_p": [0.0, 0.1, 1.0],
    "presence_penalty": [0.0, 0.5, -2.0],
    "frequency_penalty": [0.0, 0.25, -1.0],
    "repetition_penalty": [1.0, 0.5, 1.3],
    "logit_bias": [(), ((3, 2.5), (7, -100.0))],
    "min_tokens": [0, 14],
}


class Bits:
    """A mask that allows other tokens at each position."""

    is_complete = False
    fault: str | None = None

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def fill(self, allowed: np.ndarray) -> None:
        allowed[:] = np.random.default_rng(len(self.tokens)).integers(-(2**31), 2**31, len(allowed))

    def accept(self, token_id: int) -> None:
        pass

    def allows(self, token_ids: Sequence[int]) -> int:
        return len(token_ids)

    def fork(self) -> "Bits":
        return self


def params_of(chance: random.Random) -> dict[str, Any]:
    how = {name: chance.choice([values[0], *values]) for name, values in WAYS.items()}
    return how | {
        "seed": chance.randrange(-(2**63), 2**63),
        "stop_token_ids": (1, 2),
        "logprobs": chance.choice([None, 2]),
    }


def make_sampler(block: int = 32) -> DeviceSampler:
    return DeviceSampler(CPU, block=block)


def both(logits: torch.Tensor, ways: list[dict[str, Any]], block: int = 32) -> tuple[list[int], list[int]]:
    device, host = ([make_row([1, 2], **how) for how in ways] for _ in range(2))
    return make_sampler(block).draw(logits, device).read(), HostSampler().draw(logits, host).read()


@pytest.mark.parametrize("case", range(3))
def test_batches_that_change_give_the_ids_of_the_cpu_s_sampler(case: int) -> None:
    """Rows come, go and change places; positions and counts of tokens stay on the device."""
    chance = random.Random(case)
    vocab, block = [(100, 32), (65, 16), (129, 128)][case]
    generator = torch.Generator().manual_seed(case)
    sampler = make_sampler(block)
    rows: list[Row] = []
    for step in range(7):
        if not rows or (chance.random() < 0.4 and len(rows) < 6):
            tokens = [chance.randrange(vocab) for _ in range(chance.randrange(1, 30))]
            mask = Bits(tokens) if chance.random() < 0.2 else None
            rows.append(
                Row(SamplingParams(max_tokens=90, **params_of(chance)), tokens, len(tokens) // 2 + 1, EOS, mask)
            )
        if chance.random() < 0.15 and len(rows) > 1:
            del rows[chance.randrange(len(rows))]
        if chance.random() < 0.2:
            chance.shuffle(rows)
        dtype = torch.bfloat16 if step % 3 else torch.float32
        logits = (torch.randn(len(rows), vocab, generator=generator) * chance.choice([0.2, 1, 3])).to(dtype)
        before = logits.clone()
        drawn = sampler.draw(logits, rows)
        assert torch.equal(logits, before), "log-probabilities are of the model's own logits"
        token_ids, told = drawn.read(), [row.logprobs for row in rows]
        assert token_ids == drawn.token_ids.tolist()
        fresh = [Row(row.params, list(row.tokens), row.start, EOS, row.mask) for row in rows]
        assert token_ids == HostSampler().draw(logits, fresh).read()
        assert told == [row.logprobs for row in fresh]
        for row, token in zip(rows, token_ids, strict=True):
            row.tokens.append(token)  # type: ignore[attr-defined]


@pytest.mark.parametrize("how", [{"top_k": 5}, {"top_p": 0.5}, {"top_k": 40, "top_p": 0.3}, {"top_k": 7, "min_p": 0.5}])
def test_of_equal_logits_the_first_are_kept(how: dict[str, Any]) -> None:
    """Tokens in all blocks have the threshold's logit."""
    logits = torch.randint(-3, 3, (4, 90), generator=torch.Generator().manual_seed(1)).float()
    logits[3] = 0
    found, right = both(logits, [{"seed": seed, **how} for seed in range(4)])
    assert found == right


def test_near_tokens_that_all_lie_in_one_lane_are_cut_exactly() -> None:
    """They overflow the lane's list, so the logits are read again."""
    block = 32
    logits = torch.randn(4, 320, generator=torch.Generator().manual_seed(2))
    logits[:, 5::block] += 9
    assert len(logits[0, 5::block]) > 2 * DEPTH
    ways = [{"top_k": 20}, {"top_p": 0.8}, {"top_k": 30, "top_p": 0.9, "min_p": 0.01}, {"top_k": 100}]
    found, right = both(logits, [{"seed": seed, **how} for seed, how in enumerate(ways)], block)
    assert found == right


@pytest.mark.parametrize("how", [{"temperature": 0}, {}, {"top_k": 3, "top_p": 0.9}])
def test_rows_that_are_not_finite_draw_no_token_and_disturb_no_other(how: dict[str, Any]) -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(3))
    logits[1, 7], logits[2, 9], logits[3] = torch.nan, torch.inf, -torch.inf
    logits[4, :40] = -torch.inf  # excluded tokens are allowed
    rows = [make_row([1], seed=seed, frequency_penalty=0.5, **how) for seed in range(6)]
    drawn = make_sampler(16).draw(logits, rows)
    found = drawn.read()
    assert found[1:3] == [NO_TOKEN] * 2
    assert found[3] == (0 if how.get("temperature") == 0 else NO_TOKEN), "no token is left"
    assert all(0 <= token < 50 for token in drawn.token_ids.tolist()), "the next step uses them before the host looks"
    assert found == HostSampler().draw(logits, [make_row([1], **_params(row)) for row in rows]).read()


def _params(row: Row) -> dict[str, Any]:
    names = ("seed", "frequency_penalty", "temperature", "top_k", "top_p")
    return {name: getattr(row.params, name) for name in names}


class Sent:
    """Records the number of values of each copy to the device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.copies: list[int] = []

        def copied(values: Any, *rest: Any) -> torch.Tensor:
            tensor = to_device(values, *rest)
            self.copies.append(tensor.numel())
            return tensor

        monkeypatch.setattr(device_sampler, "to_device", copied)

    def take(self) -> list[int]:
        copies, self.copies = self.copies, []
        return copies


def test_only_rows_that_come_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(4, 40)
    texts = [[1, 2, 3 + i] for i in range(4)]
    rows = [make_row(text, seed=i, presence_penalty=0.5) for i, text in enumerate(texts)]
    sampler, sent = make_sampler(), Sent(monkeypatch)

    def step(batch: list[Row]) -> list[int]:
        for row, token in zip(batch, sampler.draw(logits[: len(batch)], batch).read(), strict=True):
            row.tokens.append(token)  # type: ignore[attr-defined]
        return sent.take()

    assert step(rows[:3])
    assert step(rows[:3]) == step(rows[:3]) == [], "positions and counts are updated by the kernel"
    assert step([rows[2], rows[0]]) == [4], "which rows the logits are of"
    came = step([rows[2], rows[0], rows[3]])
    assert sorted(came) == [0, 0, 1, 1, 6, 16], "its counts, empty so far, its parameters, and the batch"
    assert step([rows[2], rows[0], rows[3]]) == []
    texts[0].pop()  # its last token was discarded
    assert step([rows[2], rows[0], rows[3]])
    assert len(set(sampler._slots.values())) == 3


def test_lines_of_rows_that_go_are_used_again() -> None:
    sampler, logits = make_sampler(), torch.randn(9, 40)
    for start in range(0, 27, 9):
        ways = {"frequency_penalty": 1.0, "logit_bias": ((1, 1.0),), "min_tokens": 9}
        sampler.draw(logits, [make_row([1], seed=start + i, **ways) for i in range(9)])
    kept = sampler.tables
    tables = (kept.params, kept.counts, kept.bias, kept.ends)
    assert [len(table.lines) for table in tables] == [16] * 4
    sampler.draw(logits[:1], [make_row([1])])
    assert [len(table._free) for table in tables] == [15, 16, 16, 16]


@pytest.mark.parametrize(
    ("how", "launches"),
    [
        ({"temperature": 0}, 2),
        ({"temperature": 0.6, "top_p": 0.95, "top_k": 20}, 2),
        ({"repetition_penalty": 1.1, "presence_penalty": 0.5, "logit_bias": ((1, 1.0),), "min_tokens": 50}, 2),
        ({"mask": Bits([])}, 3),
    ],
    ids=["greedy", "top_p, top_k", "penalties", "mask"],
)
def test_a_draw_is_one_kernel_and_one_copy_of_ids(how: dict[str, Any], launches: int) -> None:
    """Also a copy of masks."""
    rows = [make_row([1, 2], seed=i, **how) for i in range(3)]
    sampler, counted = LaunchesOnly(CPU), Launches()
    logits = torch.randn(3, 40)
    for _ in range(2):
        for row, token in zip(rows, sampler.draw(logits, rows).read(), strict=True):
            row.tokens.append(token)  # type: ignore[attr-defined]
    with counted.counting():
        sampler.draw(logits, rows)
    assert counted.count == launches


def test_a_cpu_has_its_own_sampler() -> None:
    assert isinstance(choose_sampler(CPU), HostSampler)


@pytest.fixture
def with_kernel(tiny: LoadedModel) -> EngineCore:
    """An engine whose tokens the kernel draws."""
    engine = make_engine(tiny, max_running=8, num_pages=256, max_step_tokens=64, pipeline="on")
    engine._runner.sampler = DeviceSampler(CPU, block=128)  # type: ignore[attr-defined]
    return engine


def test_an_engine_gives_the_same_tokens_as_with_the_cpu_s_sampler(with_kernel: EngineCore, tiny: LoadedModel) -> None:
    """With prompts in chunks, branches, ends in the middle, and log-probabilities."""
    ways: list[dict[str, Any]] = [
        {"temperature": 0, "logprobs": 3},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "n": 2},
        {"temperature": 1.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "prompt_logprobs": 1, "logprobs": 1},
        {"temperature": 1.5, "logit_bias": ((9, 5.0), (11, -100.0)), "ignore_eos": False},
        {"temperature": 1.0, "min_tokens": 5, "stop_token_ids": tuple(range(40, 80)), "ignore_eos": False},
    ]
    requests = [
        EngineRequest(
            f"r{i}",
            prompt(20 + 9 * i, start=i),
            SamplingParams(**{"max_tokens": 4 + i, "seed": i, "ignore_eos": True, **how}),
        )
        for i, how in enumerate(ways)
    ]
    found = run(with_kernel, requests)
    right = run(make_engine(tiny, max_running=8, num_pages=256, max_step_tokens=64), requests)
    assert found.tokens == right.tokens
    assert found.branches == right.branches
    assert found.finish == right.finish
    for name, told in right.logprobs.items():
        assert [entry.logprob for entry in found.logprobs[name]] == pytest.approx(
            [entry.logprob for entry in told], abs=1e-5
        )


def test_a_stream_that_moves_between_a_cpu_and_a_device_goes_on_with_the_same_tokens(
    with_kernel: EngineCore, tiny: LoadedModel
) -> None:
    how = {"seed": 11, "ignore_eos": True, "top_p": 0.95, "presence_penalty": 0.5}
    whole = run(make_engine(tiny), [EngineRequest("r", prompt(21), SamplingParams(max_tokens=8, **how))]).tokens["r"]
    moved = EngineRequest("r", [*prompt(21), *whole[:5]], SamplingParams(max_tokens=3, **how), num_generated=5)
    assert run(with_kernel, [moved]).tokens["r"] == whole[5:]
