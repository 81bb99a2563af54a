import asyncio

import pytest

from components.errors import Cancelled
from components.text.tokenizer import TextModel
from components.wire.sampling import SamplingParams
from services.frontend import generation as module
from services.frontend.choice import TextDelta
from services.frontend.generation import Generation
from services.frontend.metrics import GapCounts
from services.frontend.ports import Prompt
from tests.services.frontend.fake_mesh import MODEL, FakeMesh
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.anyio


def generation_of(mesh: FakeMesh, text: TextModel, *, n: int = 1, prompts: int = 1) -> Generation:
    prompt = Prompt("r", MODEL, [1, 2], SamplingParams(max_tokens=100, n=n), "", 0)
    return Generation(mesh, text, [prompt] * prompts, GapCounts(), lambda *_: None)


async def test_a_client_that_reads_too_slowly_ends_all_branches_at_once(mesh: FakeMesh, text: TextModel) -> None:
    """Not only when its request's task wakes: that one waits for the client."""
    mesh.answer = "word " * 100
    shown: list[TextDelta] = []

    def show(piece: TextDelta, _: bool) -> bool:
        shown.append(piece)
        if len(shown) > 10:
            raise Cancelled("the client reads too slowly")
        return False

    generation = generation_of(mesh, text, n=2, prompts=2)

    async def run() -> None:
        async with generation.running(show):
            while mesh.running:
                await asyncio.sleep(0)
            assert len(shown) == 11
            await generation.woken()

    with pytest.raises(Cancelled, match="too slowly"):
        await asyncio.wait_for(run(), PATIENCE_S)
    assert mesh.cancelled == 3, "all but the branch that failed"


async def test_the_task_wakes_for_what_could_not_be_shown_and_for_the_last_piece_alone(
    mesh: FakeMesh, text: TextModel
) -> None:
    shown: list[TextDelta] = []

    def show(piece: TextDelta, is_last: bool) -> bool:
        shown.append(piece)
        assert is_last == (piece.finish is not None)
        return len(shown) not in (1, 3)

    generation, wakes = generation_of(mesh, text), []
    async with generation.running(show):
        while not generation.is_over:
            await generation.woken()
            wakes.append(len(shown))
    assert "".join(piece.text for piece in shown) == mesh.answer
    assert wakes == [1, 3, len(shown)]


async def test_a_last_piece_that_cannot_be_shown_ends_the_generation_with_that_error(
    mesh: FakeMesh, text: TextModel
) -> None:
    def show(piece: TextDelta, is_last: bool) -> bool:
        if is_last:
            raise Cancelled("the client reads too slowly")
        return True

    generation = generation_of(mesh, text)
    with pytest.raises(Cancelled, match="too slowly"):
        async with asyncio.timeout(PATIENCE_S), generation.running(show):
            await generation.woken()


async def test_choices_that_may_repeat_a_long_prompt_are_shown_one_per_wake(
    mesh: FakeMesh, text: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All were made in one turn, before any could be sent: 128 choices with 32,000 token ids each were cut off."""
    monkeypatch.setattr(module, "AT_ONCE_TOKENS", 11)
    shown: list[TextDelta] = []

    def show(piece: TextDelta, _: bool) -> bool:
        shown.append(piece)
        return True

    generation = generation_of(mesh, text, n=3, prompts=2)
    seen: list[set[int]] = []
    async with generation.running(show):
        while not generation.is_over:
            await generation.woken()
            seen.append({piece.choice for piece in shown})
    assert [len(choices) for choices in seen[:6]] == [1, 2, 3, 4, 5, 6]
    for choice in range(6):
        assert "".join(piece.text for piece in shown if piece.choice == choice) == mesh.answer


async def test_items_that_are_held_are_bounded(
    mesh: FakeMesh, text: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "AT_ONCE_TOKENS", 1)
    monkeypatch.setattr(module, "MAX_HELD_ITEMS", 5)
    mesh.answer = "word " * 100
    generation = generation_of(mesh, text, n=2)

    async def run() -> None:
        async with generation.running(lambda *_: True):
            while mesh.running:
                await asyncio.sleep(0)
            await generation.woken()

    with pytest.raises(Cancelled, match="too slowly"):
        await asyncio.wait_for(run(), PATIENCE_S)


async def test_leaving_cancels_what_still_runs(mesh: FakeMesh, text: TextModel) -> None:
    mesh.gate = asyncio.Semaphore(0)
    generation = generation_of(mesh, text, n=2, prompts=2)
    async with generation.running(lambda *_: True):
        assert mesh.running == 4
    assert (mesh.running, mesh.cancelled) == (0, 4)


async def test_a_prompt_that_nobody_accepts_cancels_the_others(mesh: FakeMesh, text: TextModel) -> None:
    mesh.gate = asyncio.Semaphore(0)
    accept, calls = mesh.generate, 0

    class Refusing(FakeMesh):
        async def generate(self, prompt: Prompt, sink: object) -> list[object]:  # type: ignore[override]
            nonlocal calls
            calls += 1
            if calls == 2:
                raise Cancelled("refused")
            return await accept(prompt, sink)  # type: ignore[return-value]

    generation = generation_of(Refusing(text), text, prompts=3)
    with pytest.raises(Cancelled, match="refused"):
        async with generation.running(lambda *_: True):
            pass
    assert mesh.running == 0
