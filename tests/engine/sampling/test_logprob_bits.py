"""A log-probability has the same bits alone and beside others, on any number of threads."""

from collections.abc import Iterator

import pytest
import torch

from engine.sampling.logprobs import PendingLogprobs

VOCAB = 49_152  # torch shares the sum of a row among threads from 32,768 numbers on


@pytest.fixture
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_bits_do_not_depend_on_the_batch(threads: int) -> None:
    logits = torch.randn(60, VOCAB, generator=torch.Generator().manual_seed(1)) * 4
    token_ids = torch.arange(60)

    def logprobs(rows: slice) -> list[float]:
        count = len(token_ids[rows])
        return [one.logprob for one in PendingLogprobs(logits[rows], token_ids[rows], [0] * count).read()]

    torch.set_num_threads(1)
    expected = logprobs(slice(0, 60))
    torch.set_num_threads(threads)
    for size in (1, 2, 7, 60):
        assert [one for at in range(0, 60, size) for one in logprobs(slice(at, at + size))] == expected
