"""Each thread of a step is bound to a core, if there are enough cores."""

import os
import threading

import pytest
import torch

from engine.cpu.cpu_time import own_cores
from engine.model.load import LoadedModel
from engine.ports import EngineRequest
from tests.engine.tiny_engine import greedy, make_engine, prompt


@pytest.mark.skipif(len(own_cores()) < 2, reason="it takes two cores to keep threads apart")
def test_the_computing_thread_has_a_core_of_its_own_until_a_step_has_fewer_threads(tiny: LoadedModel) -> None:
    """Two threads shared one core, while the other one was idle."""
    cores = own_cores()
    seen: list[set[int]] = []

    def compute() -> None:
        engine = make_engine(tiny, attention="cpu")
        engine._threads = None  # a busy machine would change the number
        torch.ops.kvmesh.keep_apart(torch.tensor(cores))
        for number in (len(cores), 1, len(cores)):
            torch.set_num_threads(number)
            engine.submit(EngineRequest(f"r{len(seen)}", prompt(20, start=len(seen)), greedy(2)))
            while engine.has_work():
                engine.step()
            seen.append(os.sched_getaffinity(0))

    before = torch.get_num_threads()
    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    torch.set_num_threads(before)
    assert [len(some) for some in seen] == [1, len(cores), 1]
    assert own_cores() == cores, "the main thread, whose children inherit its cores, is not bound"
