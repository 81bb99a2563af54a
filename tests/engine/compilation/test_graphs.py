"""The graphs of decode steps. The recorder is a fake, whose replay computes again."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from time import monotonic
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from bench.attention_case import AttentionCase
from engine.attention.backend import Scoring, StepAttention, StepShape
from engine.attention.opaque import OpaqueAttention
from engine.attention.plain import PlainAttention
from engine.attention.step_tables import StepLimits
from engine.compilation.graphs import CaptureFailed, CudaRecorder, DecodeGraphs, Recordable, graph_sizes
from engine.model.progress import silent

VOCAB = 7
CASE = AttentionCase((1,), (1,))


class FakeRecorder:
    """Keeps the sizes of recorded and replayed graphs."""

    def __init__(self) -> None:
        self.recorded: list[int] = []
        self.replayed: list[int] = []
        self.computed = 0  # rows of the latest computation
        self.fails_at: int | None = None

    def compute(self, token_ids: Tensor, positions: Tensor, keep: Tensor) -> Tensor:
        self.computed = len(token_ids)
        return compute(token_ids, positions, keep)

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        work()
        if self.computed == self.fails_at:
            raise CaptureFailed("operation not permitted when stream is capturing")
        self.recorded.append(self.computed)

        def replay() -> None:
            work()
            self.replayed.append(self.computed)

        return replay


class FakeAttention:
    """A backend whose table is each row's context, which attention returns."""

    def __init__(self, requests: int) -> None:
        self.limits = StepLimits(requests, 4 * requests, 100)
        self.device = torch.device("cpu")
        self.contexts = torch.full((requests + 1,), 99)

    def plan(self, shape: StepShape) -> StepAttention:
        self.contexts.zero_()
        self.contexts[: len(shape.context_lens)] = torch.tensor(shape.context_lens, dtype=torch.int64)
        return self.recorded(len(shape.context_lens))

    def recorded(self, rows: int) -> StepAttention:
        return FakeStep(self.contexts[:rows])


class FakeStep:
    def __init__(self, contexts: Tensor) -> None:
        self.contexts = contexts

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, *, sinks: Tensor | None = None
    ) -> Tensor:
        return self.contexts.float().view(1, -1, 1, 1).expand(1, query.shape[2], 1, 1)


def compute(token_ids: Tensor, positions: Tensor, keep: Tensor) -> Tensor:
    """Logits [K, VOCAB]: token, position and context of each row, then zeros."""
    one = torch.zeros(1, 1, len(token_ids), 1)
    contexts = OpaqueAttention().attend(0, one, one, one, Scoring(1.0)).view(-1)
    logits = torch.zeros(len(token_ids), VOCAB)
    logits[:, :3] = torch.stack([token_ids.float(), positions.float(), contexts], 1)
    return logits[keep]


@pytest.fixture
def recorder() -> Iterator[FakeRecorder]:
    with torch.inference_mode():  # like a runner's steps
        yield FakeRecorder()


def recorded(recorder: FakeRecorder, attention: FakeAttention) -> DecodeGraphs:
    graphs = DecodeGraphs(recorder.compute, attention, recorder)
    graphs.record_all(monotonic() + 60, silent)
    return graphs


def decode(graphs: DecodeGraphs, attention: FakeAttention, contexts: list[int]) -> list[list[float]]:
    attention.plan(StepShape([1] * len(contexts), contexts, [[0]] * len(contexts)))
    positions = torch.tensor(contexts) - 1
    return graphs(positions + 100, positions)[:, :3].tolist()


def test_a_step_runs_in_the_smallest_graph_that_holds_it(recorder: FakeRecorder) -> None:
    attention = FakeAttention(20)
    graphs = recorded(recorder, attention)
    for contexts in ([5], [7, 8, 9], [3] * 17):
        assert decode(graphs, attention, contexts) == [[c + 99, c - 1, c] for c in contexts]
    assert recorder.replayed == [2, 4, 20]


def test_a_graph_is_recorded_once_and_reads_what_each_step_put_before_it(recorder: FakeRecorder) -> None:
    attention = FakeAttention(8)
    graphs = recorded(recorder, attention)
    assert decode(graphs, attention, [5, 6]) == [[104, 4, 5], [105, 5, 6]]
    assert decode(graphs, attention, [9]) == [[108, 8, 9]]
    assert recorder.recorded == [8, 4, 2], "nothing is recorded while it serves"


def test_recording_beforehand_takes_the_largest_first_and_stops_when_time_is_up(recorder: FakeRecorder) -> None:
    """The largest is always recorded: any step fits into it."""
    attention = FakeAttention(24)
    told: list[tuple[int, int]] = []
    graphs = DecodeGraphs(recorder.compute, attention, recorder)
    graphs.record_all(monotonic() - 1, lambda _task, done, total: told.append((done, total)))
    assert recorder.recorded == [24]
    assert not attention.contexts.any(), "recording must not write KV: all rows are padding"
    graphs.record_all(monotonic() + 60, lambda _task, done, total: told.append((done, total)))
    assert recorder.recorded == [24, 16, 8, 4, 2]
    assert told[-1] == (5, 5)


def test_sizes_that_were_not_recorded_in_time_run_in_a_larger_one(recorder: FakeRecorder) -> None:
    attention = FakeAttention(24)
    graphs = DecodeGraphs(recorder.compute, attention, recorder)
    graphs.record_all(monotonic() - 1, silent)
    assert decode(graphs, attention, [7, 8]) == [[106, 6, 7], [107, 7, 8]]
    assert (recorder.recorded, recorder.replayed) == ([24], [24])


def test_all_graphs_write_their_logits_into_one_buffer(recorder: FakeRecorder) -> None:
    """Each had its own: 5 GB for 64 graphs of up to 512 rows and a vocabulary of 152,000."""
    attention = FakeAttention(24)
    graphs = recorded(recorder, attention)
    places = set()
    for count in (1, 3, 7, 20):
        attention.plan(StepShape([1] * count, [5] * count, [[0]] * count))
        places.add(graphs(torch.zeros(count, dtype=torch.int64), torch.zeros(count, dtype=torch.int64)).data_ptr())
    assert len(places) == 1


class PlayedCuda:
    """The parts of torch.cuda that record a graph; the end of the capture fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.usual = SimpleNamespace(device_index=1)
        self.stream = self.usual
        self.ended: list[object] = []
        for name, value in {
            "graph_pool_handle": lambda: (0, 7),
            "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
            "current_stream": lambda: self.stream,
            "set_stream": lambda stream: setattr(self, "stream", stream),
            "synchronize": lambda: None,
            "graph": self.graph,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(
            torch._C, "_cuda_endAllocateToPool", lambda index, pool: self.ended.append((index, pool)), raising=False
        )

    @contextmanager
    def graph(self, _graph: object, *, pool: object, capture_error_mode: str) -> Iterator[None]:
        self.stream = SimpleNamespace(device_index=1)
        try:
            yield
        except RuntimeError:
            raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904 - as torch does
        self.stream = self.usual


def test_a_capture_that_fails_says_why_and_leaves_the_usual_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the end of a capture fails, torch leaves its stream current and its memory pool in use."""
    cuda = PlayedCuda(monkeypatch)
    record = CudaRecorder()

    def syncs() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(CaptureFailed, match="not permitted when stream is capturing"):
        record(syncs)
    assert cuda.stream is cuda.usual
    assert cuda.ended == [(1, (0, 7))]
    record(lambda: None)
    assert cuda.stream is cuda.usual


@pytest.mark.parametrize("requests", [1, 2, 3, 8, 9, 64, 100])
def test_graph_sizes_end_with_the_largest_step_and_waste_little(requests: int) -> None:
    sizes = graph_sizes(requests)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max(2, requests), "no more rows than the tables have"
    assert all(b - a <= max(4, min(8, a)) for a, b in pairwise(sizes))


def test_a_backend_without_recorded_steps_is_told_apart() -> None:
    assert isinstance(FakeAttention(1), Recordable)
    assert not isinstance(PlainAttention(torch.zeros(1, 1, 1, 2, 16, 8), CASE.layout, 1), Recordable)
