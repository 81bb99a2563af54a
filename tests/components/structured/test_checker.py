"""Constraints are checked in processes of their own: what costs too much dies there, and nobody else waits."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from components.errors import Overloaded, QueueFull
from components.structured import checker as module
from components.structured.check import Unusable
from components.structured.checker import TOO_COMPLEX, ConstraintChecker, open_checker
from components.structured.metrics import ConstraintMetrics
from components.wire.sampling import Constraint

pytestmark = pytest.mark.anyio
BUDGET_S = 0.5
SLOW_MULTIPLE = {"type": "integer", "multipleOf": 999_983}  # half a minute
DOUBLING: dict[str, Any] = {  # 2^20 schemas
    "$ref": "#/$defs/d20",
    "$defs": {"d0": {"type": "string"}}
    | {
        f"d{i}": {
            "type": "object",
            "properties": {"a": {"$ref": f"#/$defs/d{i - 1}"}, "b": {"allOf": [{"$ref": f"#/$defs/d{i - 1}"}] * 2}},
        }
        for i in range(1, 21)
    },
}


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="module")
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture(scope="module")
async def checker(folder: Path, registry: CollectorRegistry) -> AsyncIterator[ConstraintChecker]:
    async with open_checker(folder, BUDGET_S, ConstraintMetrics(registry)) as opened:
        yield opened


def json_schema(schema: Any) -> Constraint:
    return Constraint(kind="json_schema", text=json.dumps(schema))


def regex(text: str) -> Constraint:
    return Constraint(kind="regex", text=text)


def lark(text: str) -> Constraint:
    return Constraint(kind="lark", text=text)


def results(registry: CollectorRegistry) -> dict[str, float]:
    name = "structured_output_requests_total"
    return {
        result: registry.get_sample_value(name, {"result": result}) or 0 for result in ("compiled", "cached", "refused")
    }


async def test_what_can_be_kept_is_checked_once(checker: ConstraintChecker, registry: CollectorRegistry) -> None:
    before = results(registry)
    asked = json_schema({"type": "object", "properties": {"a": {"type": "integer"}}})
    assert await asyncio.gather(*(checker.check(asked) for _ in range(3))) == [asked] * 3
    assert await checker.check(json_schema({"type": "object", "properties": {"a": {"type": "integer"}}})) == asked
    after = results(registry)
    assert after["compiled"] - before["compiled"] == 1
    assert after["cached"] - before["cached"] == 1


async def test_ebnf_becomes_lark(checker: ConstraintChecker) -> None:
    usable = await checker.check(lark('root ::= "yes" | "no" [0-9]*'))
    assert usable.kind == "lark"
    assert "::=" not in usable.text
    assert await checker.check(usable) == usable


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        (json_schema({"type": "array", "uniqueItems": True}), "'uniqueItems' is not supported"),
        (json_schema({"type": "strin"}), "Invalid type: strin"),
        (json_schema({"type": "string", "format": "phone"}), "format: phone"),
        (json_schema({"type": "string", "pattern": "(?=x)"}), "look-ahead"),
        (json_schema({"$ref": "http://example.com/schema"}), "'\\$ref'"),
        (json_schema({"$ref": "#/$defs/none"}), "/\\$defs/none"),
        (json_schema({"$ref": "#"}), "nothing that satisfies"),
        (json_schema({"allOf": [{"type": "string"}, {"type": "integer"}]}), "Unsatisfiable"),
        (json_schema({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}), "use 'anyOf'"),
        (json_schema({"type": "object", "properties": {f"p{i}": {} for i in range(700)}}), "too many ways open"),
        (json_schema({"enum": [f"value {i * 7919}" for i in range(60_000)]}), "more than"),
        (Constraint(kind="json_schema", text="{"), "not valid JSON"),
        (Constraint(kind="json_schema", text="[" * 150 + "]" * 150), "must be an object"),
        (Constraint(kind="json_schema", text='{"items":' * 150 + "{}" + "}" * 150), "deeper than"),
        (regex("(a"), "unclosed group"),
        (regex(r"(a)\1"), "backreferences"),
        (regex("a{1000000000}"), "too complex"),
        (regex("(" * 5000 + "a" + ")" * 5000), "invalid regex"),
        (lark('start: "a" b'), "unknown name"),
        (lark('root ::= "a'), "."),
        (lark("start: " + "(" * 3000 + '"a"' + ")" * 3000), "too deeply nested"),
        (lark("start: r0\n" + "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(30)) + 'r30: "a"'), "too many ways"),
        (lark("start: <|nope|>"), "special token"),
        (lark("start: a\na[temperature=0.5]: /x+/"), "'temperature'"),
        (lark('start: %json {"properties": {"a": {"minLenght": 1}}} "."'), "'minLenght' at '/properties/a'"),
        (lark("start: A\nA: /.*a.{20}/ & /.*b.{21}/ & /.*c.{22}/ & /.*d.{23}/"), "too complex"),
    ],
)
async def test_what_cannot_be_kept_is_refused_with_its_reason(
    checker: ConstraintChecker, asked: Constraint, named: str
) -> None:
    with pytest.raises(Unusable, match=named):
        await checker.check(asked)


async def test_a_bomb_is_refused_within_the_budget_and_holds_up_nobody(checker: ConstraintChecker) -> None:
    """Neither the event loop, nor another request whose constraint is to be checked."""
    await asyncio.gather(*(checker.check(regex(f"warm{i}")) for i in range(2)))  # both processes are there
    gaps: list[float] = []

    async def tick() -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.001)
            gaps.append(time.perf_counter() - before)

    ticking = asyncio.create_task(tick())
    bomb = asyncio.create_task(checker.check(json_schema(SLOW_MULTIPLE)))
    await asyncio.sleep(0.05)
    for i in range(5):
        await checker.check(regex(f"[a-z]{{{i + 2}}}"))
    assert not bomb.done(), "half a second of CPU, and five times five milliseconds"
    with pytest.raises(Unusable, match=TOO_COMPLEX):
        await bomb
    ticking.cancel()
    assert sorted(gaps)[int(len(gaps) * 0.9)] < 0.1  # 2 ms where nobody else wants the processor
    with pytest.raises(Unusable, match=TOO_COMPLEX):  # known by now
        await asyncio.wait_for(checker.check(json_schema(SLOW_MULTIPLE)), 0.05)
    assert await checker.check(regex("after")) == regex("after")


async def test_memory_and_stack_are_bounded_too(checker: ConstraintChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unusable, match="too complex"):
        await checker.check(json_schema(DOUBLING))
    assert await checker.check(regex("b+")) == regex("b+")


async def test_more_than_can_wait_are_sent_away(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 2)
    async with open_checker(folder, BUDGET_S, ConstraintMetrics(CollectorRegistry())) as opened:
        first = [asyncio.create_task(opened.check(regex(f"x{i}"))) for i in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await opened.check(regex("x2"))
        await asyncio.gather(*first)
        await opened.check(regex("x2"))


async def test_a_process_that_does_not_start_is_our_fault_not_the_client_s(tmp_path: Path) -> None:
    async with open_checker(tmp_path, BUDGET_S, ConstraintMetrics(CollectorRegistry())) as opened:
        with pytest.raises(Overloaded):
            await opened.check(regex("a"))


async def test_whoever_leaves_does_not_take_the_answer_from_others(checker: ConstraintChecker) -> None:
    asked = regex("leaving+")
    leaving = asyncio.create_task(checker.check(asked))
    staying = asyncio.create_task(checker.check(asked))
    await asyncio.sleep(0)
    leaving.cancel()
    assert await staying == asked
