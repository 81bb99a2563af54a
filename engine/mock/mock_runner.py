"""Steps without a device: marks instead of KV."""

import math
import random
import sys
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from struct import Struct
from typing import Final
from zlib import crc32

from components.errors import InvariantBroken, Rejected
from components.wire.embed import EmbeddingModel
from components.wire.logprobs import TokenLogprobs
from components.wire.tokens import pack_tokens
from engine.config import MockConfig, attended
from engine.mock.marked_pages import MarkedPages
from engine.model.pooling import Pooling
from engine.parallel.rank_processes import RankProcesses
from engine.ports import Recording
from engine.scheduler.request import Chunk, Request

SEED: Final = Struct("<Q")
MIX: Final = 0x9E3779B1  # 2^32 divided by the golden ratio, so that neighbouring checksums give distant tokens
MASKED: Final = "engine.mock.masked"  # imported with the first mask, because it needs numpy


class MockRunner:
    """Draws tokens from the seed and the marks, which depend on all earlier tokens.

    So tokens are the same on every worker, unless the wrong KV was transferred.
    """

    takes_cpu: Final = False
    forward_kind: Final = ""

    def __init__(
        self,
        pages: MarkedPages,
        config: MockConfig,
        alphabet: Sequence[int],
        eos_token_id: int | None,
        adapters: Mapping[str, str],
        *,
        vocab_size: int,
        pooling: Pooling | None = None,
        processes: RankProcesses | None = None,  # other ranks
    ) -> None:
        self._pooling = pooling
        self._processes = processes
        self._pages = pages
        self._config = config
        self._alphabet = alphabet
        self._eos_token_id = eos_token_id
        self._vocab_size = vocab_size
        self._origins = {name: crc32(identity.encode()) for name, identity in adapters.items()}
        self._busy_until_s = 0.0  # the simulated device runs one step at a time
        self._drawn: dict[Request, int] = {}  # tokens drawn in the latest step

    def launch(self, chunks: Sequence[Chunk]) -> "MockStep":
        """Write the marks of the tokens in `chunks`.

        Raises: StepFailed.
        """
        started_s = max(time.perf_counter(), self._busy_until_s)
        checksums: list[int] = []
        prompt_tokens = decodes = context_tokens = pairs = 0
        extend = self._pages.extend
        for chunk in chunks:
            request, start, end = chunk.request, chunk.start, chunk.end
            if (length := end - start) == 1:
                decodes += 1
                context_tokens += end
                token_id = self._drawn[request] if chunk.ahead else request.tokens[start]
                checksum = extend(request.pages, token_id, start)
                checksums.append(self._mark(chunk) if checksum is None else checksum)
            else:
                prompt_tokens += length
                pairs += attended(start, length)
                checksums.append(self._mark(chunk))
        self._busy_until_s = started_s + self._config.duration_s(prompt_tokens, decodes, context_tokens, pairs)
        return MockStep(self, chunks, checksums, self._busy_until_s)

    def _mark(self, chunk: Chunk) -> int:
        request = chunk.request
        origin = self._origins.get(request.adapter, 0)
        if not chunk.ahead:
            return self._pages.compute(request.pages, request.tokens, chunk.start, chunk.end, origin)
        request.tokens.append(self._drawn[request])  # temporarily, because a copy of all tokens would take longer
        try:
            return self._pages.compute(request.pages, request.tokens, chunk.start, chunk.end, origin)
        finally:
            request.tokens.pop()

    def draw(self, chunks: Sequence[Chunk], checksums: Sequence[int]) -> list[Sequence[int]]:
        if self._pooling is not None:
            return self._pool(chunks, checksums, self._pooling)
        drawn: dict[Request, int] = {}
        token_ids: list[Sequence[int]] = []
        for chunk, checksum in zip(chunks, checksums, strict=True):
            if chunk.samples:
                token_id = drawn[chunk.request] = self._draw(chunk, checksum)
                token_ids.append((token_id,))
            else:
                token_ids.append(())
        self._drawn = drawn
        return token_ids

    def _pool(self, chunks: Sequence[Chunk], checksums: Sequence[int], pooling: Pooling) -> list[Sequence[int]]:
        for chunk, checksum in zip(chunks, checksums, strict=True):
            if chunk.samples:
                chunk.request.vector = made_up_vector(checksum, pooling.about)
        return [()] * len(chunks)

    def store_logprobs(
        self, chunks: Sequence[Chunk], checksums: Sequence[int], token_ids: Sequence[Sequence[int]]
    ) -> None:
        for chunk, checksum, drawn in zip(chunks, checksums, token_ids, strict=True):
            request = chunk.request
            alternatives = request.sampling.logprobs
            if drawn and alternatives is not None:
                request.row.logprobs = made_up_logprobs(checksum, drawn[0], alternatives, self._alphabet)
            if request.sampling.prompt_logprobs is not None and request.reads_prompt and self._pooling is None:
                store_prompt_logprobs(chunk, self._alphabet)

    def copy_pages(self, moves: Sequence[tuple[int, int]]) -> None:
        for source, target in moves:
            self._pages.copy(source, target)

    def start_profile(self, facts: Mapping[str, str]) -> None:
        raise Rejected("this worker runs the mock engine, which computes nothing: profile one with a model")

    def on_loss(self, callback: Callable[[Exception], None]) -> None:
        if self._processes is not None:
            self._processes.on_loss(callback)

    def close(self) -> None:
        if self._processes is not None:
            self._processes.close()

    def stop_profile(self) -> Recording:
        raise InvariantBroken("the mock engine records no profile")

    def _draw(self, chunk: Chunk, checksum: int) -> int:
        request = chunk.request
        sampling = request.sampling
        if sampling.temperature > 0:
            checksum = crc32(SEED.pack(sampling.seed % 2**64), checksum)
        drawn = (checksum * MIX) & 0xFFFFFFFF
        length = self._config.answer_tokens
        may_end = not sampling.ignore_eos and not request.row.must_go_on
        ends = may_end and length > 0 and drawn % length == 0
        if request.mask is not None and not chunk.dropped:
            token_id: int = import_module(MASKED).draw_masked(request.row, self._vocab_size, drawn, ends=ends)
            return token_id
        if ends and self._eos_token_id is not None:
            return self._eos_token_id
        return self._alphabet[(drawn >> 8) % len(self._alphabet)]


class MockStep:
    """A step whose work is already done, and that only waits for the simulated device."""

    def __init__(self, runner: MockRunner, chunks: Sequence[Chunk], checksums: Sequence[int], until_s: float) -> None:
        self._runner = runner
        self.chunks = chunks
        self._checksums = checksums
        self._until_s = until_s
        self._token_ids: list[Sequence[int]] = []

    def sample(self) -> None:
        """Draw the tokens, once the masks have accepted all earlier ones."""
        self._token_ids = self._runner.draw(self.chunks, self._checksums)

    def wait_s(self) -> float:
        return max(0.0, self._until_s - time.perf_counter())

    def result(self) -> Sequence[Sequence[int]]:
        if left_s := self.wait_s():
            time.sleep(left_s)
        self._runner.store_logprobs(self.chunks, self._checksums, self._token_ids)
        return self._token_ids


def made_up_vector(checksum: int, model: EmbeddingModel) -> bytes:
    draw = random.Random(checksum)
    values = [draw.gauss(0.0, 1.0) for _ in range(model.dimensions)]
    length = math.hypot(*values) if model.normalised else 1.0
    vector = array("f", [value / length for value in values])
    if sys.byteorder == "big":
        vector.byteswap()
    return vector.tobytes()


STEPS: Final = 1024  # log-probabilities are multiples of 1 / STEPS, which are exact in float32


def made_up_logprobs(checksum: int, token_id: int, alternatives: int, alphabet: Sequence[int]) -> TokenLogprobs:
    logprob = -(checksum % STEPS) / STEPS
    others = [other for other in alphabet[:alternatives] if other != token_id]
    top = [(other, logprob - i) for i, other in enumerate([token_id, *others][:alternatives])]
    return TokenLogprobs(logprob, tuple(top))


def store_prompt_logprobs(chunk: Chunk, alphabet: Sequence[int]) -> None:
    request = chunk.request
    logprobs, alternatives = request.row.prompt_logprobs, request.sampling.prompt_logprobs
    if logprobs is None or alternatives is None:
        return
    for position in range(len(logprobs) + 1, min(chunk.end + 1, request.prompt_len)):
        checksum = crc32(pack_tokens([position, request.tokens[position]]))
        logprobs.append(made_up_logprobs(checksum, request.tokens[position], alternatives, alphabet))
