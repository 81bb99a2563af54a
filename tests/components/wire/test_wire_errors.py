import math
from typing import Any

import pytest

from components.errors import BY_NAME, InvariantBroken, MeshError, Overloaded, PeerBroken, PromptTooLong, QueueFull
from components.wire.codec import pack, unpack
from components.wire.refused import Refused, raised, refusal


def sent(error: MeshError) -> MeshError:
    return raised(unpack(pack(refusal(error)), Refused))


@pytest.mark.parametrize("cls", [cls for _, cls in sorted(BY_NAME.items())])
def test_an_error_is_raised_on_the_other_side_as_what_it_was(cls: type[MeshError]) -> None:
    """Except for a defect, which is not one of this process."""
    error = sent(cls("why", request_id="r", bytes=7, share=0.5, param=None))
    ours = issubclass(cls, InvariantBroken) and not issubclass(cls, PeerBroken)
    assert type(error) is (PeerBroken if ours else cls)
    assert error.message == str(error) == "why"
    assert {"request_id": "r", "bytes": 7, "share": 0.5, "param": None}.items() <= error.fields.items()


@pytest.mark.parametrize("cls", [c for c in BY_NAME.values() if issubclass(c, Overloaded)])
@pytest.mark.parametrize("seconds", [0.0, 0.25, 2.0, 3])
def test_the_wait_survives(cls: type[Overloaded], seconds: float) -> None:
    error = sent(cls("full", retry_after_s=seconds))
    assert isinstance(error, Overloaded)
    assert error.retry_after_s == error.fields["retry_after_s"] == seconds


@pytest.mark.parametrize("seconds", ["soon", None, math.nan, math.inf, -1])
def test_a_wait_that_is_none_becomes_one_second(seconds: Any) -> None:
    error = raised(Refused(error="QueueFull", message="full", fields={"retry_after_s": seconds}))
    assert isinstance(error, QueueFull)
    assert error.retry_after_s == 1.0


@pytest.mark.parametrize("name", ["message", "self", "cls"])
def test_a_field_may_be_named_like_a_parameter(name: str) -> None:
    """It raised TypeError instead of the other side's error."""
    assert sent(PromptTooLong("long", **{name: 1})).fields == {name: 1}
    assert sent(QueueFull("full", **{name: 1})).fields == {name: 1, "retry_after_s": 1.0}


def test_an_error_is_sent_with_any_fields() -> None:
    carried: dict[str, Any] = {"huge": 2**80, "flag": True, "list": [1]}
    assert sent(PromptTooLong("long", **carried)).fields == {"huge": str(2**80), "flag": "True", "list": "[1]"}


def test_an_error_that_this_process_does_not_know_is_a_bug_that_keeps_its_words() -> None:
    error = raised(Refused(error="FromTheFuture", message="why"))
    assert type(error) is PeerBroken
    assert error.message == "FromTheFuture: why"
