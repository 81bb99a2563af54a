"""The cost of steps, which decides how many prompt tokens may share a step with decodes, and which drafts are worthwhile."""

from collections import deque
from statistics import median
from typing import Final

MIN_CHUNK_TOKENS: Final = 32  # because each step has a fixed cost
MIN_DISAGGREGATED_CHUNK_TOKENS: Final = 16  # beside streams whose prompts were computed elsewhere
MAX_STEP_STRETCH: Final = 2.0  # factor by which a prompt chunk may lengthen a decode step
FIRST_CHUNK_TOKENS: Final = 64  # before the speed is known
STEPS_IN_MEDIAN: Final = 9  # latest steps of each kind
STEPS_IN_REGRESSION: Final = 64  # latest steps
WORK_EXPONENT: Final = 1.5  # fits steps of 1 to 16 rows on one and on two cores (docs/decisions/029)
USUAL_ROWS: Final = 5
ASSUMED_ROW_COST: Final = 1 / 16  # share of a step, until steps of different sizes are known
ASSUMED_ROW_COST_WEIGHT: Final = 32.0  # as a sum of squared distances from the mean number of rows
MIN_ROW_COST: Final = 1 / 100  # share of a step
MAX_STEP_OVER_MEAN: Final = 3.0  # in mean step times; a longer step counts as this long
CHANCE_MARGIN: Final = 1.25  # because overestimated chances are selected more often


class StepCost:
    """Medians of the latest steps: one slow step has no effect, and a lasting change has one after five steps."""

    def __init__(self) -> None:
        self._decode_s: dict[int, deque[float]] = {}  # steps without prompts, by bit length of the number of decodes
        self._token_s: deque[float] = deque(maxlen=STEPS_IN_MEDIAN)  # per prompt token, without the step's decodes

    def decode_s(self, decodes: int) -> float:
        """Seconds of a step with about `decodes` decodes; 0: unknown."""
        if not self._decode_s:
            return 0.0
        size = decodes.bit_length()
        nearest = min(self._decode_s, key=lambda known: (abs(known - size), known))
        return median(self._decode_s[nearest])

    def prompt_token_s(self) -> float:
        return median(self._token_s) if self._token_s else 0.0

    def stepped(self, prompt_tokens: int, decodes: int, step_s: float) -> None:
        """Learn from a step without drafts, or from what it would have taken without them."""
        if prompt_tokens >= MIN_DISAGGREGATED_CHUNK_TOKENS:
            prompt_s = max(step_s - (self.decode_s(decodes) if decodes else 0.0), step_s / 2, 1e-6)
            self._token_s.append(prompt_s / prompt_tokens)
        elif not prompt_tokens and decodes:
            self._decode_s.setdefault(decodes.bit_length(), deque(maxlen=STEPS_IN_MEDIAN)).append(step_s)


class RowCost:
    """Cost of rows, which are decodes and drafts, in a step without prompts, by linear regression over the latest steps.

    Few rows wait for the weights, many for the processor. So another row costs more in a step of many rows, and the
    regression is over `_work` instead of rows.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque()  # work, seconds
        self._sums = 0.0, 0.0, 0.0, 0.0  # of work, seconds, work², work x seconds

    def stepped(self, rows: int, step_s: float) -> None:
        if self._steps:
            _, all_s, _, _ = self._sums
            step_s = min(step_s, MAX_STEP_OVER_MEAN * all_s / len(self._steps))  # other processes took the cores
        self._steps.append((_work(rows), step_s))
        self._add(*self._steps[-1], 1)
        if len(self._steps) > STEPS_IN_REGRESSION:
            self._add(*self._steps.popleft(), -1)

    def without_drafts_s(self, decodes: int, rows: int, step_s: float) -> float:
        """Return the time that a step of `rows` would have taken with its `decodes` alone."""
        if rows == decodes or not self._steps:
            return step_s
        # at least as if each row cost the same
        return max(step_s - (_work(rows) - _work(decodes)) * self._work_s, step_s * decodes / rows)

    def least_chance(self, decodes: int, rows: int, drafts: int) -> float:
        """Return how likely `drafts` more drafts must be in a step of `rows`.

        They are worthwhile if an expected token of theirs costs no more than a token of the `decodes` alone.
        """
        work = (_work(rows + drafts) - _work(rows)) / drafts
        count, (all_work, all_s, _, _) = len(self._steps), self._sums
        if not all_s:
            return min(1.0, CHANCE_MARGIN * decodes * work * ASSUMED_ROW_COST)
        work_s = self._work_s
        step_s = max(all_s / count + (_work(decodes) - all_work / count) * work_s, _work(decodes) * work_s)
        return min(1.0, CHANCE_MARGIN * decodes * work * work_s / step_s)

    @property
    def _work_s(self) -> float:
        """Seconds of one more unit of work."""
        count, (all_work, all_s, squares, products) = len(self._steps), self._sums
        mean_work, mean_s = all_work / count, all_s / count
        together, spread = products - all_work * mean_s, squares - all_work * mean_work
        line_s = (together + ASSUMED_ROW_COST_WEIGHT * ASSUMED_ROW_COST * mean_s) / (spread + ASSUMED_ROW_COST_WEIGHT)
        return max(line_s, MIN_ROW_COST * mean_s)

    def _add(self, work: float, step_s: float, sign: int) -> None:
        all_work, all_s, squares, products = self._sums
        self._sums = (
            all_work + sign * work,
            all_s + sign * step_s,
            squares + sign * work * work,
            products + sign * work * step_s,
        )


def _work(rows: int) -> float:
    """Return what the time of a step grows with, in units of one more row in a step of USUAL_ROWS."""
    return rows**WORK_EXPONENT / (WORK_EXPONENT * USUAL_ROWS ** (WORK_EXPONENT - 1))


class ChunkLimit:
    """Limits prompt chunks beside decodes: a step takes at most `target_s`, or `stretch` times as long as the decodes alone.

    So prompts get at least the share 1 - 1 / `stretch` of the time.

    Disaggregated streams, whose prompts were computed elsewhere, should barely wait for prompts that are computed here.
    Beside them `stretch` is at most MAX_STEP_STRETCH, `target_s` does not apply, and a chunk may be shorter.

    Beside other streams a chunk may have `overrun` times as many tokens if they complete its prompt, because a short rest
    would delay the first token by a whole step.

    Source: chunked prefill, Agrawal et al. 2023, "SARATHI", arXiv:2308.16369.
    """

    def __init__(self, target_s: float, stretch: float = MAX_STEP_STRETCH, overrun: float = 1.0) -> None:
        self._target_s = target_s
        self._stretch = stretch
        self._overrun = overrun
        self._cost = StepCost()

    def tokens(self, decodes: int, disaggregated: int = 0) -> tuple[int, int]:
        """Limit the prompt tokens in a step with `decodes` decodes, of which some are `disaggregated`.

        Returns: the limit, and the limit for a first chunk that completes its prompt.
        """
        token_s = self._cost.prompt_token_s()
        if not token_s:
            return FIRST_CHUNK_TOKENS, FIRST_CHUNK_TOKENS
        decode_s = self._cost.decode_s(decodes)
        if disaggregated:
            fewest, overrun = MIN_DISAGGREGATED_CHUNK_TOKENS, 1.0
            step_s = min(self._stretch, MAX_STEP_STRETCH) * decode_s or self._target_s
        else:
            fewest, overrun = MIN_CHUNK_TOKENS, self._overrun
            step_s = max(self._target_s, self._stretch * decode_s)
        tokens = max(fewest, int((step_s - decode_s) / token_s))
        return tokens, int(overrun * tokens)

    def stepped(self, prompt_tokens: int, decodes: int, step_s: float) -> None:
        self._cost.stepped(prompt_tokens, decodes, step_s)
