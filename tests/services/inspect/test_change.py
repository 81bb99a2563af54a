"""The instances of a change, and the end of a drain."""

import json
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from components.errors import BackendUnavailable, DeadlineExceeded, MeshError, NobodyListens
from components.settings import MeshSettings
from components.wire.control import Control, Controlled
from components.wire.status import Status
from services.inspect import change
from services.inspect.change import one_of, show_drain
from services.inspect.mesh import Seen
from tests.services.inspect.meshes import seen

INSTANCES = [
    Seen(role, instance_id, "")
    for role, instance_id in (("decode", "d1"), ("decode", "d10"), ("decode", "host-1"), ("prefill", "host-1"))
]


@pytest.mark.parametrize(("which", "found"), [("d1", 0), ("d10", 1), ("decode/host-1", 2), ("prefill/h", 3)])
def test_an_id_that_begins_another_one_is_found_and_so_is_one_of_a_role(which: str, found: int) -> None:
    assert one_of(INSTANCES, which) is INSTANCES[found]


def test_what_names_several_instances_is_refused_with_the_form_that_names_one() -> None:
    with pytest.raises(SystemExit, match=r"host-1 \(decode\), host-1 \(prefill\); name one as ROLE/ID"):
        one_of(INSTANCES, "host-1")


class Worker:
    """A decode instance: its successive statuses, the last one repeated."""

    def __init__(self, *answers: MeshError | int) -> None:
        self.seen = seen("decode")
        self.answers = list(answers)  # errors, or numbers of running requests
        self.is_registered = True
        self.bus = self

    async def instances(self) -> list[Seen]:
        return [self.seen]

    @property
    def book(self) -> Any:
        return SimpleNamespace(of_role=lambda _role: [self.seen.record] if self.is_registered else [])

    async def call(self, subject: str, *_args: object, **_kwargs: object) -> Any:
        if subject.endswith(".control"):
            return Controlled(log_level="info", traces_per_s=1.0, draining=True)
        if len(self.answers) == 1:
            self.is_registered = False
        answer = self.answers.pop(0)
        if isinstance(answer, MeshError):
            raise answer
        return Status(instance_id="d1", role="decode", running=answer)


async def drained(worker: Worker, monkeypatch: pytest.MonkeyPatch, *, as_json: bool = False) -> str:
    @asynccontextmanager
    async def opened(_settings: MeshSettings) -> Any:
        yield worker

    monkeypatch.setattr(change, "open_mesh", opened)
    monkeypatch.setattr(change, "LOOK_EVERY_S", 0.0)
    console = Console(width=200)
    with console.capture() as shown:
        assert await show_drain(MeshSettings(), console, "d1", Control(work="drain"), wait=True, as_json=as_json)
    return shown.get()


@pytest.mark.anyio
@pytest.mark.parametrize("last", [0, NobodyListens("no subscriber")])
async def test_a_question_without_an_answer_does_not_end_the_wait(
    last: MeshError | int, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(
        DeadlineExceeded("busy"), BackendUnavailable("NATS is away"), NobodyListens("it reconnects"), 2, last
    )
    shown = await drained(worker, monkeypatch)
    assert not worker.answers
    assert shown.endswith("decode d1 has no work left\n")


@pytest.mark.anyio
async def test_the_outcome_of_a_wait_is_json_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert json.loads(await drained(Worker(1, 0), monkeypatch, as_json=True))["draining"] is True
