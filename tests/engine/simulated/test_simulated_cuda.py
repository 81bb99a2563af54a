"""Refused operations and late effects of the simulated device."""

from collections.abc import Callable, Iterator

import pytest
import torch
import triton
import triton.language as tl

from engine.device.copies import Arrival
from tests.engine.simulated.simulated_cuda import simulated_cuda
from tests.engine.simulated.simulated_device import DeviceTensor, SimulatedDevice, SimulationError

pytestmark = pytest.mark.skipif(torch.version.cuda is not None, reason="for a torch without CUDA")


@triton.jit  # type: ignore[untyped-decorator]
def double_kernel(out, x, LENGTH: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, LENGTH)
    tl.store(out + at, 2 * tl.load(x + at))


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    with simulated_cuda() as simulated, torch.inference_mode():
        yield simulated


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device="cuda:0")


def test_tensors_are_on_the_device_and_compute(device: SimulatedDevice) -> None:
    x = numbers(1, 2, 3)
    x[1:].add_(10)
    assert (x.device, x.is_cuda, (x * 2).device) == (torch.device("cuda:0"), True, torch.device("cuda:0"))
    assert (x * 2).tolist() == [2, 24, 26]
    assert x.sum().item() == 26
    moved = torch.nn.Linear(3, 2).to("cuda:0")
    assert isinstance(moved.weight, DeviceTensor)
    assert moved(x).device.type == "cuda"
    assert x.to("cpu").device == torch.device("cpu")


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x + torch.ones(3),
        lambda x: torch.cat([x, torch.ones(3)]),
        lambda x: x.index_select(0, torch.tensor([0])),
        lambda x: double_kernel[(1,)](torch.empty(2), x, LENGTH=2),
    ],
)
def test_tensors_of_both_devices_are_refused(device: SimulatedDevice, work: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises(SimulationError, match="main memory"):
        work(numbers(1, 2, 3))
    with pytest.raises(TypeError, match="convert cuda"):
        numbers(1).numpy()


def test_a_copy_to_the_host_has_arrived_when_its_event_is_over(device: SimulatedDevice) -> None:
    x, y = numbers(1, 2), numbers(5)
    copied = (x + 1).to("cpu", non_blocking=True)
    arrival = Arrival(torch.device("cuda:0"))
    later = y.to("cpu", non_blocking=True)
    assert copied.isnan().all()
    assert arrival.wait_s() > 0
    assert arrival.wait_s() == 0
    assert copied.tolist() == [2, 3]
    assert later.isnan().all()
    torch.cuda.current_stream().synchronize()
    assert later.tolist() == [5]


def test_pinned_memory_stays_as_it_is_until_it_was_copied(device: SimulatedDevice) -> None:
    waits, host = len(device.waits), torch.ones(2).pin_memory()
    assert host.to("cuda:0", non_blocking=True).device.type == "cuda"
    host.numpy()[0] = 7
    with pytest.raises(SimulationError, match="pinned memory was changed"):
        device.end_copies()
    assert len(device.waits) == waits
    torch.ones(2).to("cuda:0", non_blocking=True)  # torch waits: this memory may be paged
    assert len(device.waits) == waits + 1


def test_a_graph_reads_its_inputs_again_and_computes_nothing_while_it_is_recorded(device: SimulatedDevice) -> None:
    x, out, drawn = numbers(0, 0), numbers(0, 0), numbers(0, 0)
    graphs = [torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()]
    memory = torch.cuda.graph_pool_handle()
    between = []
    for graph in graphs:
        with torch.cuda.graph(graph, pool=memory):
            between.append(x * 2)
            out.copy_(between[-1].view(2, 1).t().flatten() + 1)
            double_kernel[(1,)](drawn, out, LENGTH=2)
    assert out.tolist() == drawn.tolist() == [0, 0]
    x.fill_(3)
    graphs[0].replay()
    assert (out.tolist(), drawn.tolist(), between[0].tolist()) == ([7, 7], [14, 14], [6, 6])
    x.fill_(4)
    graphs[1].replay()
    assert out.tolist() == [9, 9]
    assert between[0].isnan().all(), "another graph has used its memory"


@pytest.mark.parametrize(
    ("work", "error"),
    [
        (lambda x: x.sum().item(), "not permitted when stream is capturing"),
        (lambda x: x[torch.tensor([True, False])], "not permitted when stream is capturing"),
        (lambda _x: torch.cuda.synchronize(), "not permitted when stream is capturing"),
        (lambda x: x.copy_(torch.ones(2).pin_memory(), non_blocking=True), "between device and main memory"),
    ],
)
def test_a_graph_that_needs_the_host_is_refused(
    device: SimulatedDevice, work: Callable[[torch.Tensor], object], error: str
) -> None:
    x = numbers(1, 2)

    def record() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), pool=torch.cuda.graph_pool_handle()):
            x.add_(1)
            work(x)

    with pytest.raises((RuntimeError, SimulationError), match=error):
        record()
    assert x.tolist() == [1, 2]


def test_torch_is_as_before_afterwards() -> None:
    with simulated_cuda():
        assert torch.cuda.device_count() == 2
    assert not torch.cuda.is_available()
    with pytest.raises(NotImplementedError, match="CUDA"):
        torch.zeros(1, device="cuda:0")
