"""Log-probabilities to report: of the model's own logits, whatever became of them before the draw."""

from collections.abc import Sequence

import torch

from engine.ports import TokenLogprobs
from engine.sampling.check import MAX_LOGPROBS
from engine.sampling.row import Row


class RawLogits:
    """A copy of the logits of those rows that report log-probabilities, taken before they are changed."""

    def __init__(self, logits: torch.Tensor, rows: Sequence[Row]) -> None:
        """Copy from `logits`, float32 [B, vocab]; row i belongs to rows[i]."""
        self._wanting = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
        self._rows = [rows[i] for i in self._wanting]
        self._logits = logits[self._wanting] if self._wanting else None

    def note(self, token_ids: Sequence[int]) -> None:
        """Leave with each row what there is to say of the token chosen for it, one for each row of the batch."""
        if self._logits is None:
            return
        chosen = [token_ids[i] for i in self._wanting]
        alternatives = [row.params.logprobs or 0 for row in self._rows]
        for row, told in zip(self._rows, logprobs_of(self._logits, chosen, alternatives), strict=True):
            row.logprobs = told


def note_prompt(row: Row, logits: torch.Tensor, first: int) -> None:
    """Leave with `row` the log-probabilities of prompt tokens; logits[i] was computed at token `first` + i.

    What is noted already, before a retraction, is not noted again. Whatever follows the prompt is not the prompt's.
    """
    told, count = row.prompt_logprobs, row.params.prompt_logprobs
    assert told is not None
    assert count is not None
    begin, end = len(told), min(first + len(logits), len(row.tokens) - 1)
    if begin < end:  # logits at token p tell of token p + 1
        tokens = row.tokens[begin + 1 : end + 1]
        told += logprobs_of(logits[begin - first : end - first], tokens, [count] * len(tokens))


def logprobs_of(logits: torch.Tensor, token_ids: Sequence[int], alternatives: Sequence[int]) -> list[TokenLogprobs]:
    """Of token i after row i of `logits`, float32 [N, vocab], with the alternatives[i] most probable ones."""
    norm = logits.logsumexp(dim=-1, keepdim=True)
    index = torch.tensor(token_ids, device=logits.device).unsqueeze(1)
    chosen: list[float] = (logits.gather(1, index) - norm).squeeze(1).tolist()
    if not any(alternatives):
        return [TokenLogprobs(logprob) for logprob in chosen]
    # always as many: which of equal logits come first must not depend on what others in the batch ask for
    values, ids = logits.topk(min(MAX_LOGPROBS, logits.shape[1]), dim=-1)
    tops = zip(ids.tolist(), (values - norm).tolist(), strict=True)
    return [
        TokenLogprobs(logprob, tuple(zip(top_ids[:count], top_values[:count], strict=True)))
        for logprob, (top_ids, top_values), count in zip(chosen, tops, alternatives, strict=True)
    ]
