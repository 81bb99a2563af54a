"""Log-probabilities of a prompt take memory for some rows of the vocabulary at a time, however long the prompt is."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.ports import EngineRequest
from engine.sampling.logprobs import SLICE
from tests.engine.tiny_engine import VOCAB, greedy, load_tiny, make_engine, prompt, run


class Widest(TorchDispatchMode):  # type: ignore[no-untyped-call]  # as torch ships it
    """Records the most rows of a vocabulary in float32 of any operation."""

    rows = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype is torch.float32 and result.shape[-1:] == (VOCAB,):
            self.rows = max(self.rows, result.numel() // VOCAB)
        return result


@pytest.mark.parametrize("length", [50, 450])
def test_the_vocabulary_is_widened_for_some_rows_at_a_time(tiny_dir: Path, length: int) -> None:
    """All of a chunk's logits became float32 at once: 5 GB for 8,192 rows of a vocabulary of 152,000."""
    engine = make_engine(load_tiny(tiny_dir, dtype="bfloat16"), dtype="bfloat16", max_step_tokens=512)
    with Widest() as widest:  # type: ignore[no-untyped-call]
        seen = run(engine, [EngineRequest("r", prompt(length), greedy(2, prompt_logprobs=2))])
    assert len(seen.prompt_logprobs["r"]) == length - 1
    assert 0 < widest.rows <= SLICE
