from itertools import product

import pytest

from components.errors import IllegalTransition
from components.lifecycle import Lifecycle
from components.wire.sampling import SamplingParams
from engine.ports import Phase
from engine.scheduler.request import NEXT, Request, RequestState


def request_in(state: RequestState) -> Request:
    sampling = SamplingParams(max_tokens=1)
    request = Request("r", [1], 1, 2, sampling, Phase.FULL, arrival=0, root_hash=b"")
    request.lifecycle = Lifecycle("request r", NEXT, state)
    return request


@pytest.mark.parametrize(("was", "to"), list(product(RequestState, RequestState)))
def test_a_request_moves_along_the_table_and_nowhere_else(was: RequestState, to: RequestState) -> None:
    request = request_in(was)
    if to in NEXT.get(was, set()):
        request.advance(to)
        assert request.state is to
    else:
        with pytest.raises(IllegalTransition, match=f"{was} → {to}"):
            request.advance(to)
        assert request.state is was


def test_every_state_can_be_reached_and_only_finished_is_final() -> None:
    assert {to for row in NEXT.values() for to in row} | {RequestState.WAITING} == set(RequestState)
    assert set(RequestState) - set(NEXT) == {RequestState.FINISHED}
