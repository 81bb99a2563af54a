"""What computes a step, and the step that it is computing."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from components.errors import InvariantBroken
from engine.ports import Recording
from engine.scheduler.scheduler import Chunk


class StepFailed(InvariantBroken):
    """The requests of one step could not be computed; the next step may go well."""


class Launched(Protocol):
    """A step that was launched. `sample` is called once, then `result`, before the next but one is launched."""

    def sample(self) -> None:
        """Have the tokens drawn, without waiting; all tokens before them are known now. Raises: StepFailed.

        It comes before the next launch. A chunk that was dropped meanwhile is drawn for as well, or not: nobody looks.
        """

    def wait_s(self) -> float:
        """After how long to ask again whether `result` would have to wait; 0: it would not. Asked after `sample`."""

    def result(self) -> list[int | None]:
        """Wait for the tokens, one for each chunk that `samples`. Raises: StepFailed.

        NO_TOKEN where the numbers of a chunk's request are not finite, be it one that samples or not.
        Log-probabilities that a request asks for are left in its `row`. From now on the device neither reads nor writes
        pages for this step; that holds, too, when anything here raises StepFailed.
        """


class Runner(Protocol):
    """What computes steps, one after the other. On a device it enqueues them and does not wait."""

    @property
    def takes_cpu(self) -> bool:
        """Whether a step is computed by the processor that would plan the next one meanwhile."""

    @property
    def forward_kind(self) -> str:
        """How the model ran in the latest step: eager, compiled, graph; empty without a model."""

    def launch(self, chunks: Sequence[Chunk]) -> Launched:
        """Write the KV of `chunks`, one a request. Raises: StepFailed.

        The step before may still be in flight, but it has been told to sample: a chunk that is `ahead` takes its last
        token from there, on the device.
        """

    def copy_page(self, source: int, target: int) -> None:
        """Copy one page's KV of all layers, after what was launched and before what will be."""

    def wait_s(self, has_prompts: Callable[[], bool]) -> float:
        """After how long to ask again whether a step, with prompts or of decodes alone, has its cores; 0: it has.

        Asked of a runner that `takes_cpu` alone; `launch` waits itself where nobody has asked. `has_prompts` looks at every
        request, and is called where it makes a difference.
        """

    def done(self) -> None:
        """A step has ended."""

    def rest(self) -> None:
        """There is nothing to compute for now."""

    def start_profile(self, facts: Mapping[str, str]) -> None:
        """Record what is computed from here on. Raises: Rejected, without anything to record."""

    def stop_profile(self) -> Recording:
        """End the profile that was started."""


class Flight(msgspec.Struct, frozen=True, eq=False):
    """A step that was launched and has not landed, that is, whose tokens are not the requests' yet."""

    chunks: list[Chunk]
    launched: Launched
