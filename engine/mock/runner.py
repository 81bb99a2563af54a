"""A step without a device: marks instead of KV, tokens drawn from the marks, and the time that it would have taken."""

import time
from collections.abc import Callable, Mapping, Sequence
from struct import Struct
from typing import Final
from zlib import crc32

from components.errors import InvariantBroken, Rejected
from components.wire.logprobs import TokenLogprobs
from engine.mock.config import MockConfig, attended
from engine.mock.logprobs import leave_prompt_logprobs, made_up
from engine.mock.memory import MarkedPages
from engine.ports import Recording, SamplingParams
from engine.sampling.row import Row
from engine.scheduler.request import Request
from engine.scheduler.scheduler import Chunk

SEED: Final = Struct("<Q")
MIX: Final = 0x9E3779B1  # 2^32 over the golden ratio: neighbouring checksums become distant tokens


class MockRunner:
    """Draws the token at a position from all tokens before it, as the pages hold them, and from the seed.

    So it is the same on every worker, after a move and after a retraction, and another one where KV of another prompt or
    adapter was moved. A temperature of 0 makes the seed irrelevant, as everywhere.
    """

    def __init__(
        self,
        pages: MarkedPages,
        config: MockConfig,
        alphabet: Sequence[int],
        eos_token_id: int | None,
        adapters: Mapping[str, str],
    ) -> None:
        self._pages = pages
        self._config = config
        self._alphabet = alphabet
        self._eos_token_id = eos_token_id
        self._origins = {name: crc32(identity.encode()) for name, identity in adapters.items()}
        self._busy_until_s = 0.0  # the device that is not there takes one step after the other
        self._drawn: dict[Request, int] = {}  # in the latest step

    def launch(self, chunks: Sequence[Chunk]) -> "MockStep":
        """Mark the tokens of `chunks` and draw one for each that `samples`. Raises: StepFailed."""
        started_s = max(time.perf_counter(), self._busy_until_s)
        drawn: dict[Request, int] = {}
        told: list[tuple[Row, TokenLogprobs]] = []
        reading: list[Chunk] = []
        prompt_tokens = decodes = context_tokens = pairs = 0
        for chunk in chunks:
            request = chunk.request
            tokens = [*request.tokens, self._drawn[request]] if chunk.ahead else request.tokens
            origin = self._origins.get(request.adapter, 0)
            checksum = self._pages.compute(request.pages, tokens, chunk.start, chunk.end, origin)
            if chunk.samples:
                drawn[request] = self._draw(checksum, request.sampling)
                if (alternatives := request.sampling.logprobs) is not None:
                    told.append((request.row, made_up(checksum, drawn[request], alternatives, self._alphabet)))
            if request.reads_prompt:
                reading.append(chunk)
            if chunk.length == 1:
                decodes += 1
                context_tokens += chunk.end
            else:
                prompt_tokens += chunk.length
                pairs += attended(chunk.start, chunk.length)
        self._drawn = drawn
        self._busy_until_s = started_s + self._config.duration_s(prompt_tokens, decodes, context_tokens, pairs)
        tokens_drawn = [drawn.get(chunk.request) for chunk in chunks]
        return MockStep(tokens_drawn, self._busy_until_s, lambda: self._leave(told, reading))

    def copy_page(self, source: int, target: int) -> None:
        """Copy one page's marks."""
        self._pages.copy(source, target)

    def wait_s(self, *, prompts: bool) -> float:
        """It takes no cores."""
        return 0

    def done(self) -> None:
        """Nobody waits for it."""

    def rest(self) -> None:
        """Nothing is kept from others."""

    def start_profile(self, facts: Mapping[str, str]) -> None:
        """Raises: Rejected."""
        raise Rejected("this worker runs the mock engine, which computes nothing: profile one with a model")

    def stop_profile(self) -> Recording:
        """None was started. Raises: InvariantBroken."""
        raise InvariantBroken("the mock engine records no profile")

    def _leave(self, told: Sequence[tuple[Row, TokenLogprobs]], reading: Sequence[Chunk]) -> None:
        for row, logprobs in told:
            row.logprobs = logprobs
        for chunk in reading:
            leave_prompt_logprobs(chunk, self._alphabet)

    def _draw(self, checksum: int, sampling: SamplingParams) -> int:
        if sampling.temperature > 0:
            checksum = crc32(SEED.pack(sampling.seed % 2**64), checksum)
        drawn = (checksum * MIX) % 2**32
        length = self._config.answer_tokens
        if self._eos_token_id is not None and length and not sampling.ignore_eos and drawn % length == 0:
            return self._eos_token_id
        return self._alphabet[(drawn >> 8) % len(self._alphabet)]


class MockStep:
    """A step that is over when the device would be done with it; everything else has happened already."""

    def __init__(self, token_ids: list[int | None], until_s: float, leave_logprobs: Callable[[], None]) -> None:
        self._token_ids = token_ids
        self._until_s = until_s
        self._leave_logprobs = leave_logprobs

    def sample(self) -> None:
        """Nothing is left to draw: no mask and no penalty changes what the mock says."""

    def result(self) -> list[int | None]:
        """Wait for the device that is not there."""
        left_s = self._until_s - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)
        self._leave_logprobs()
        return self._token_ids
