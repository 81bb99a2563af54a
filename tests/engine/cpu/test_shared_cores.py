"""Cores lent between processes, through a real file and real locks."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.build import assemble
from engine.compilation.forward import EagerForward
from engine.cpu import shared_cores
from engine.cpu.shared_cores import LOOK_S, SLOTS, SharedCores
from engine.model.load import LoadedModel
from engine.ports import Engine, EngineRequest, StepOutput
from engine.start import run_engine
from tests.engine.tiny_engine import greedy, make_engine, prompt, run, small
from tests.waiting import PATIENCE_S, until, wait_until

WORKING = """
import sys, time
from pathlib import Path
from engine.cpu.shared_cores import LOOK_S, SharedCores
shared = SharedCores(Path(sys.argv[1]), 8, 2)
while not (threads := shared.ask(prompts=True)):
    time.sleep(LOOK_S)
print(threads, flush=True)
time.sleep(60)
"""


@contextmanager
def another(path: Path) -> Iterator["subprocess.Popen[str]"]:
    """Run another worker that stays in a step."""
    command = [sys.executable, "-c", WORKING, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        assert int(worker.stdout.readline()) >= 2
        try:
            yield worker
        finally:
            worker.kill()


def test_one_that_is_alone_has_all_cores_and_one_of_two_its_half(tmp_path: Path) -> None:
    one, two = (SharedCores(tmp_path / "cores", 8, 2) for _ in range(2))
    assert threads(one, prompts=True) == 8
    assert threads(two, prompts=True) == 4
    assert threads(one, prompts=True) == 4
    one.rest()
    assert threads(two, prompts=True) == 8
    two.close()
    assert threads(one, prompts=True) == 8
    one.close()


def test_where_workers_were_added_all_have_fewer_threads(tmp_path: Path) -> None:
    """Each worker kept its first share, so later workers waited, or computed on cores of others."""
    crowd = [SharedCores(tmp_path / "cores", 4, 2) for _ in range(4)]
    for each in crowd:
        threads(each, prompts=True)
    assert [threads(each, prompts=True) for each in crowd] == [1, 1, 1, 1]


def test_decodes_take_cores_only_of_those_who_have_rested_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_cores, "RESTED_NS", 10**12)
    one, two = (SharedCores(tmp_path / "cores", 8, 2) for _ in range(2))
    assert threads(one, prompts=False) == 8  # the other one never had work
    threads(two, prompts=True)
    two.rest()
    assert threads(one, prompts=False) == 4
    assert threads(one, prompts=True) == 8
    monkeypatch.setattr(shared_cores, "RESTED_NS", 0)
    assert threads(one, prompts=False) == 8


def test_one_that_was_killed_at_work_gives_its_cores_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_cores, "SILENT_NS", 0)
    me = SharedCores(tmp_path / "cores", 8, 2)
    with another(tmp_path / "cores") as other:
        assert threads(me, prompts=True) == 4
        other.send_signal(signal.SIGSTOP)  # silent, and yet it has its threads
        assert threads(me, prompts=True) == 4
        other.kill()
        other.wait()
    assert threads(me, prompts=True) == 8


def test_a_silent_one_is_asked_after_only_when_it_was_silent_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_cores, "SILENT_NS", 10**12)
    me = SharedCores(tmp_path / "cores", 8, 2)
    with another(tmp_path / "cores") as other:
        other.kill()
        other.wait()
        assert threads(me, prompts=True) == 4
        monkeypatch.setattr(shared_cores, "SILENT_NS", 0)
        assert threads(me, prompts=True) == 8


def test_more_workers_than_slots_have_their_share(tmp_path: Path) -> None:
    crowd = [SharedCores(tmp_path / "cores", 8, 2) for _ in range(SLOTS)]
    late = SharedCores(tmp_path / "cores", 8, 2)
    assert threads(late, prompts=True) == 2
    late.rest()
    for each in crowd:
        each.close()
    late.close()
    assert threads(SharedCores(tmp_path / "cores", 8, 2), prompts=True) == 8


def test_cores_that_are_spared_are_neither_taken_nor_lent(tmp_path: Path) -> None:
    spared = 1
    prefill, decode = (SharedCores(tmp_path / "cores", 4, 4, lambda: spared) for _ in range(2))
    prefill.adapt()
    allowed, used = (cell for cell in prefill.cells() or ())
    assert prefill.ask(prompts=True) == 3
    assert decode.ask(prompts=False) == 0
    assert allowed[0] == 1  # each of three has one, and a prompt the rest
    used[0] = 1
    assert decode.ask(prompts=False) == 1
    decode.rest()
    assert allowed[0] == 3
    prefill.done()
    spared = 0
    assert threads(prefill, prompts=True) == 4
    spared = 9
    assert threads(prefill, prompts=True) == 1  # no worker waits forever


def test_no_worker_gets_more_cores_than_its_neighbours_outside_leave_it(tmp_path: Path) -> None:
    prefill, decode = adapting(tmp_path / "cores"), SharedCores(tmp_path / "cores", 8, 4)
    allowed, used = (cell for cell in prefill.cells() or ())
    assert decode.ask(prompts=False, most=3) == 3
    assert prefill.ask(prompts=True, most=6) == 5
    decode.rest()
    assert (allowed[0], used[0]) == (6, 5)  # two more cores are free, but of no use
    prefill.done()
    assert prefill.ask(prompts=True, most=1) == 1


def adapting(path: Path, cores: int = 8, least: int = 4) -> SharedCores:
    """Make shares whose steps follow the file."""
    worker = SharedCores(path, cores, least)
    worker.adapt()
    return worker


def test_a_prompt_has_the_cores_of_decodes_while_these_rest(tmp_path: Path) -> None:
    prefill, decode = adapting(tmp_path / "cores"), SharedCores(tmp_path / "cores", 8, 4)
    allowed, used = (cell for cell in prefill.cells() or ())
    assert prefill.ask(prompts=True) == 8
    assert (allowed[0], used[0]) == (8, 8)
    assert decode.ask(prompts=False) == 0  # first it must get them back
    assert allowed[0] == 4
    assert decode.ask(prompts=False) == 0
    used[0] = 4  # between two layers
    assert decode.ask(prompts=False) == 4
    decode.rest()
    assert allowed[0] == 8


def test_decodes_keep_their_cores_from_one_step_to_the_next(tmp_path: Path) -> None:
    prefill, decode = adapting(tmp_path / "cores"), SharedCores(tmp_path / "cores", 8, 4)
    allowed, _ = (cell for cell in prefill.cells() or ())
    assert threads(decode, prompts=False) == 8
    assert prefill.ask(prompts=True) == 4
    assert decode.ask(prompts=False) == 4
    decode.done()
    assert allowed[0] == 4
    prefill.done()
    assert prefill.ask(prompts=True) == 4
    decode.rest()
    prefill.done()
    assert prefill.ask(prompts=True) == 8


def test_two_prompts_and_decodes_never_have_more_cores_than_there_are(tmp_path: Path) -> None:
    first, second, decode = (adapting(tmp_path / "cores", 4, 1) for _ in range(3))
    assert first.ask(prompts=True) == 4
    assert second.ask(prompts=True) == 0
    follow(first)
    assert second.ask(prompts=True) == 2
    assert decode.ask(prompts=False) == 0
    follow(first, second)
    assert decode.ask(prompts=False) == 1
    first.rest()
    follow(second)
    assert sum(first._used) == 4
    decode.rest()
    follow(second)
    assert sum(first._used) == 4


def test_a_worker_that_is_killed_leaves_prompts_nothing_to_follow(tmp_path: Path) -> None:
    me = SharedCores(tmp_path / "cores", 8, 2)
    with another(tmp_path / "cores") as other:
        assert me.ask(prompts=False) == 0
        me._allowed[1] = 8
        other.kill()
        other.wait()
        assert me.ask(prompts=False) == 4
        assert (me._allowed[1], me._used[1]) == (0, 0)


def test_a_step_under_way_follows_between_two_layers(tmp_path: Path, tiny: LoadedModel) -> None:
    """Through the kernel, with the same tokens as undisturbed."""
    other = SharedCores(tmp_path / "cores", 3, 1)
    threads(other, prompts=True)
    other.rest()
    wanted = run(make_engine(tiny), [asked()]).tokens["r"]
    seen: list[tuple[int, ...]] = []

    class Disturbed(EagerForward):
        def __call__(self, *step: Any) -> torch.Tensor:
            began = torch.get_num_threads()
            told = other.ask(prompts=True)
            logits = super().__call__(*step)
            if step[0].shape[0] > 1:
                seen.append((began, told, torch.get_num_threads(), other.ask(prompts=True)))
            other.done()
            return logits

    engine = assemble(tiny, small(), Disturbed(tiny.module), cores=SharedCores(tmp_path / "cores", 3, 1))
    before = torch.get_num_threads()
    try:
        assert run(engine, [asked()]).tokens["r"] == wanted
    finally:
        torch.set_num_threads(before)
    assert seen == [(3, 0, 1, 1)]


@pytest.mark.anyio
async def test_an_engine_computes_with_what_it_is_lent_and_lends_what_it_does_not_need(
    tmp_path: Path, tiny: LoadedModel
) -> None:
    """The number of threads changes between steps, the tokens do not."""
    other, wanted = SharedCores(tmp_path / "cores", 3, 1), run(make_engine(tiny), [asked()]).tokens["r"]
    found: list[int] = []
    seen: list[int] = []

    class Watched(EagerForward):
        def __call__(self, *step: Any) -> torch.Tensor:
            seen.append(torch.get_num_threads())  # of the engine's thread
            return super().__call__(*step)

    def stepped(output: StepOutput) -> None:
        found.extend(token for tokens in output.tokens for token in tokens.token_ids)
        if len(found) == 10:
            threads(other, prompts=True)

    def build() -> Engine:
        return assemble(tiny, small(), Watched(tiny.module), cores=SharedCores(tmp_path / "cores", 3, 1))

    async with run_engine(build) as engine:
        engine.on_output(stepped)
        assert threads(other, prompts=True) == 3
        other.rest()
        await engine.between_steps(lambda engine: engine.submit(asked()))
        await until(lambda: len(found) >= len(wanted))
        await until(lambda: threads(other, prompts=True) == 3, "it says that it rests")
    assert found == wanted
    assert seen[0] == 3
    assert 1 in seen


def test_who_has_new_work_waits_for_the_step_that_has_its_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_cores, "PATIENCE_NS", 10**12)
    one, two = (SharedCores(tmp_path / "cores", 8, 2) for _ in range(2))
    over = threading.Event()

    def borrow() -> None:
        with step(one, prompts=True) as lent:
            assert lent == 8
            over.wait(PATIENCE_S)

    borrowing = threading.Thread(target=borrow)
    borrowing.start()
    wait_until(lambda: one._used[0])
    for _ in range(3):
        assert not two.ask(prompts=False), "its cores are lent"
        time.sleep(LOOK_S)
    over.set()
    with step(two, prompts=False) as mine, step(one, prompts=True) as its:
        assert (mine, its) == (4, 4)
    borrowing.join()


def test_one_that_is_stopped_with_cores_of_others_holds_nobody_up_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_cores, "PATIENCE_NS", 10**8)
    me = SharedCores(tmp_path / "cores", 8, 2)
    with another(tmp_path / "cores") as other:
        other.send_signal(signal.SIGSTOP)
        assert threads(me, prompts=True) == 4
        monkeypatch.setattr(shared_cores, "PATIENCE_NS", 10**12)
        threading.Timer(0.1, other.kill).start()
        assert threads(me, prompts=True) == 4


def follow(*workers: SharedCores) -> None:
    """Follow the file, like the kernel between two layers."""
    for worker in workers:
        allowed, used = worker.cells() or (None, None)
        assert allowed is not None
        assert used is not None
        used[0] = allowed[0]


def threads(worker: SharedCores, *, prompts: bool) -> int:
    """Return the threads of a short step."""
    with step(worker, prompts=prompts) as number:
        return number


@contextmanager
def step(worker: SharedCores, *, prompts: bool) -> Iterator[int]:
    """Yield the threads of a step, after waiting for them."""
    while not (number := worker.ask(prompts=prompts)):
        time.sleep(LOOK_S)
    try:
        yield number
    finally:
        worker.done()


def asked() -> EngineRequest:
    return EngineRequest("r", prompt(40), greedy(60, ignore_eos=True))
