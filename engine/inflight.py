"""The interface of what computes steps."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from components.errors import InvariantBroken
from engine.ports import Recording
from engine.scheduler.scheduler import Chunk


class StepFailed(InvariantBroken):
    """One step's requests could not be computed; the next step may succeed."""


class Launched(Protocol):
    """A launched step. `sample` is called once, then `result`, before the next but one is launched."""

    def sample(self) -> None:
        """Draw the tokens without waiting, before the next launch; all tokens before them are known. Raises:
        StepFailed.
        """

    def wait_s(self) -> float:
        """Seconds until `result` is likely to return at once; 0: now. Called after `sample`."""

    def result(self) -> list[int | None]:
        """Wait for the tokens of chunks that `samples`. Raises: StepFailed.

        NO_TOKEN for a request with NaN or infinite numbers. Log-probabilities are left in the request's `row`. From
        now on, also after StepFailed, the device does not use pages for this step.
        """


class Runner(Protocol):
    @property
    def takes_cpu(self) -> bool:
        """Whether steps run on the processor that would plan the next one."""

    @property
    def forward_kind(self) -> str:
        pass

    def launch(self, chunks: Sequence[Chunk]) -> Launched:
        """Write the KV of `chunks`, one per request. Raises: StepFailed.

        The step before may be in flight, after its `sample`: a chunk that is `ahead` takes its last token from it,
        on the device.
        """

    def copy_page(self, source: int, target: int) -> None:
        """Copy all layers' KV, after the launched steps and before the next."""

    def wait_s(self, has_prompts: Callable[[], bool]) -> float:
        """Seconds until it should ask again for a step's cores; 0: they are there.

        Only for a runner that `takes_cpu`; without a call, `launch` waits. `has_prompts` is expensive, so it is a
        function.
        """

    def done(self) -> None:
        pass

    def rest(self) -> None:
        pass

    def start_profile(self, facts: Mapping[str, str]) -> None:
        """Raises: Rejected, if there is nothing to record."""

    def stop_profile(self) -> Recording:
        pass


class Flight(msgspec.Struct, frozen=True, eq=False):
    """A launched step that has not landed: its tokens are not the requests' yet."""

    chunks: list[Chunk]
    launched: Launched
