from services.inspect.workers import unchanged
from tests.components.discovery.records import record


def test_an_instance_that_registers_or_leaves_while_all_are_asked_is_not_shown_as_silent_or_unregistered() -> None:
    there, gone, again, late = record("there"), record("gone"), record("again", "e1"), record("late")
    answers = {("decode", name): name for name in ("there", "gone", "again", "late", "stranger")}
    now = [there, record("again", "e2"), late]
    assert unchanged([there, gone, again], now, answers) == (
        [there],
        {("decode", "there"): "there", ("decode", "stranger"): "stranger"},
    )
