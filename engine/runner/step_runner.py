"""Interface of the runner that computes steps."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from components.errors import InvariantBroken
from engine.ports import Recording
from engine.scheduler.request import Chunk


class StepFailed(InvariantBroken):
    """One step failed. The next one may succeed."""


class Launched(Protocol):
    """A launched step. Call `sample` once, then `result`, before the launch after the next."""

    @property
    def chunks(self) -> Sequence[Chunk]:
        """The chunks passed to `launch`."""

    def sample(self) -> None:
        """Draw the tokens without waiting, before the next launch.

        Raises: StepFailed.
        """

    def wait_s(self) -> float:
        """Estimated seconds until `result` returns without waiting."""

    def result(self) -> Sequence[Sequence[int]]:
        """Wait for the tokens of each chunk: none unless it `samples`; with drafts, one more than these.

        NO_TOKEN stands for NaN or infinite numbers. The device no longer uses the step's pages, even after StepFailed.

        Raises: StepFailed.
        """


class Runner(Protocol):
    @property
    def takes_cpu(self) -> bool: ...

    @property
    def forward_kind(self) -> str:
        pass

    def launch(self, chunks: Sequence[Chunk]) -> Launched:
        """Start to compute `chunks`, one per request. The previous step may be in flight.

        A chunk that is `ahead` takes its last token from it, on the device.

        Raises: StepFailed.
        """

    def copy_pages(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy (source, target) pages that no step in flight uses, and wait. Ids beyond the pool are offloaded pages."""

    def start_profile(self, facts: Mapping[str, str]) -> None: ...

    def stop_profile(self) -> Recording:
        pass

    def on_loss(self, callback: Callable[[Exception], None]) -> None: ...

    def close(self) -> None: ...
