"""A limit in a test is `PATIENCE_S`, or a constant whose comment says what would take longer."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.waiting import PATIENCE_S

TESTS: Final = Path(__file__).parent
EXPIRES_S: Final = 2.0  # shorter ones are meant to pass
AT: Final = {"timeout": 0, "join": 0, "wait_for": 1}  # the position of a call's limit; others have `timeout`


def limits(path: Path) -> Iterator[tuple[int, float]]:
    """Yield (line, seconds) of each number that limits a wait."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            values = [keyword.value for keyword in node.keywords if keyword.arg == "timeout"]
            if (at := AT.get(node.func.attr)) is not None:
                values += node.args[at : at + 1]
            for value in values:
                if isinstance(value, ast.Constant) and isinstance(value.value, int | float):
                    yield value.lineno, float(value.value)


def test_no_wait_has_a_number_that_a_busy_machine_may_exceed() -> None:
    found = [
        f"{path.relative_to(TESTS)}:{line}: {seconds} s"
        for path in sorted(TESTS.rglob("*.py"))
        for line, seconds in limits(path)
        if EXPIRES_S < seconds < PATIENCE_S
    ]
    assert not found
