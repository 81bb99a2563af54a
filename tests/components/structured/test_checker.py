"""Constraints are checked in other processes: an expensive one ends its process, and delays no other request."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from components.errors import Overloaded, TooManyChecks
from components.structured import checker as module
from components.structured.check_constraint import Unusable
from components.structured.checker import TOO_COMPLEX, ConstraintChecker, open_checker
from components.structured.grammar import load_vocabulary, start_matcher
from components.structured.metrics import ConstraintMetrics
from components.wire.sampling import Constraint
from tests.loop_gap import MAX_GAP_S, longest_gap
from tests.waiting import PATIENCE_S, until

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
MUTUAL = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
ANY_OF_ANY: dict[str, Any] = {  # 2^60 ways to one string
    "$ref": "#/$defs/d60",
    "$defs": {"d0": {"type": "string"}}
    | {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i - 1}"}] * 2} for i in range(1, 61)},
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
    name = "kvmesh_structured_output_requests_total"
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


AB = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("more", "is_kept"),
    [
        ({"maxProperties": 2}, False),
        ({"maxProperties": 2, "required": ["a"]}, False),
        ({"maxProperties": 2, "additionalProperties": False}, False),
        ({"maxProperties": 3, "required": ["a", "b"]}, True),
        ({"maxProperties": 1, "additionalProperties": False}, True),
        ({"maxProperties": 1, "additionalProperties": False, "required": ["a"]}, False),
    ],
)
async def test_max_properties_is_enforced_where_the_docs_promise_it(
    checker: ConstraintChecker, more: dict[str, Any], is_kept: bool
) -> None:
    """docs/openai.md listed the keyword without its condition."""
    with contextlib.nullcontext() if is_kept else pytest.raises(Unusable, match="maxProperties"):
        await checker.check(json_schema({**AB, **more}))


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (AB, r'{"\u0061": "x"}'),
        ({"type": "string", "format": "date"}, '"2023-02-29"'),
        ({"type": "string", "format": "time"}, '"12:34:60Z"'),
        ({"type": "string", "format": "date-time"}, '"2023-02-29T12:34:60Z"'),
        ({"type": "number"}, "1e400"),
    ],
)
def test_an_answer_may_break_its_schema_only_as_documented(folder: Path, schema: Any, text: str) -> None:
    """The exceptions in docs/openai.md. If the compiler supports one of these, mend the docs."""
    matcher = start_matcher(load_vocabulary(folder), json_schema(schema))
    assert matcher.consume_tokens(list(text.encode()))
    assert matcher.is_accepting()


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
        (json_schema({"$ref": "file:///etc/passwd"}), "'\\$ref'"),
        (json_schema(MUTUAL), "nothing that satisfies"),
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
        (lark('start: %json {"$ref": "file:///etc/passwd"}'), "'\\$ref'"),
        (lark("start: a\na[temperature=0.5]: /x+/"), "'temperature'"),
        (lark('start: %json {"properties": {"a": {"minLenght": 1}}} "."'), "'minLenght' at '/properties/a'"),
        (
            lark('start: a b\na: %json {"title": "f"}\nb: %json {"title": "g", "$ref": "#/x"}'),
            "in the schema of 'g', .*/x",
        ),
        (lark("start: A\nA: /.*a.{20}/ & /.*b.{21}/ & /.*c.{22}/ & /.*d.{23}/"), "too complex"),
    ],
)
async def test_what_cannot_be_kept_is_refused_with_its_reason(
    checker: ConstraintChecker, asked: Constraint, named: str
) -> None:
    with pytest.raises(Unusable, match=named):
        await checker.check(asked)


@pytest.mark.parametrize(
    "asked",
    [
        json_schema(ANY_OF_ANY),
        json_schema({"type": "string", "pattern": "^(a{1,1000}){1,1000}$"}),
        json_schema({"type": "string", "minLength": 2**31}),
        json_schema({"type": "array", "items": {"type": "string", "maxLength": 10**9}, "maxItems": 10**9}),
        regex("(a{1,1000}){1,1000}"),
        regex("(((a{0,100}){0,100}){0,100}){0,100}"),
        lark('start: start "a" | start start | "a"'),
        lark("start: a\na: a a |"),
        lark('%llguidance {"test_trace": true}\nstart: "a"'),
    ],
    ids=lambda asked: asked.text[:40],
)
async def test_what_looks_like_a_bomb_is_answered_within_the_budget(
    checker: ConstraintChecker, asked: Constraint
) -> None:
    """Accepted or refused within the budget, and the next one is checked as usual."""
    async with asyncio.timeout(PATIENCE_S):
        with contextlib.suppress(Unusable):
            assert (await checker.check(asked)).kind == asked.kind
    assert await checker.check(regex("after")) == regex("after")


async def test_a_bomb_is_refused_within_the_budget_and_delays_no_other_check(checker: ConstraintChecker) -> None:
    await asyncio.gather(*(checker.check(regex(f"warm{i}")) for i in range(2)))  # starts both processes
    async with longest_gap() as gap:
        bomb = asyncio.create_task(checker.check(json_schema(SLOW_MULTIPLE)))
        await asyncio.sleep(0.05)
        for i in range(5):
            await checker.check(regex(f"[a-z]{{{i + 2}}}"))
        assert not bomb.done(), "half a second of CPU, and five times five milliseconds"
        with pytest.raises(Unusable, match=TOO_COMPLEX):
            await bomb
    assert gap[0] < MAX_GAP_S
    with pytest.raises(Unusable, match=TOO_COMPLEX):  # cached: it waits for nothing
        checker.check(json_schema(SLOW_MULTIPLE)).send(None)
    assert await checker.check(regex("after")) == regex("after")


async def test_memory_and_stack_are_bounded_too(checker: ConstraintChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unusable, match="too complex"):
        await checker.check(json_schema(DOUBLING))
    assert await checker.check(regex("b+")) == regex("b+")


@pytest.mark.parametrize("limit", ["MAX_WAITING", "MAX_WAITING_OF_A_CALLER"])
async def test_more_than_can_wait_are_sent_away(folder: Path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(module, limit, 2)
    async with open_checker(folder, BUDGET_S, ConstraintMetrics(CollectorRegistry())) as opened:
        first = [asyncio.create_task(opened.check(regex(f"x{i}"), b"one")) for i in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(TooManyChecks):
            await opened.check(regex("x2"), b"one")
        if limit == "MAX_WAITING":
            with pytest.raises(TooManyChecks):
                await opened.check(regex("x2"), b"another")
        else:
            await opened.check(regex("x2"), b"another")
        await asyncio.gather(*first, opened.check(regex("x1"), b"one"))  # which waits already
        await opened.check(regex("x3"), b"one")
        assert not opened._callers


async def test_a_process_that_does_not_start_is_our_fault_not_the_client_s(tmp_path: Path) -> None:
    async with open_checker(tmp_path, BUDGET_S, ConstraintMetrics(CollectorRegistry())) as opened:
        with pytest.raises(Overloaded):
            await opened.check(regex("a"))


async def test_a_caller_that_leaves_does_not_cancel_the_answer_for_others(checker: ConstraintChecker) -> None:
    asked = regex("leaving+")
    leaving = asyncio.create_task(checker.check(asked))
    staying = asyncio.create_task(checker.check(asked))
    await asyncio.sleep(0)
    leaving.cancel()
    assert await staying == asked


def bombs(count: int) -> list[Constraint]:
    """Constraints that take half a minute each."""
    return [json_schema({"type": "integer", "multipleOf": 999_983 - 2 * i}) for i in range(count)]


async def begun(
    checker: ConstraintChecker, constraints: list[Constraint], caller: bytes
) -> list[asyncio.Task[Constraint]]:
    """Start checks, until all processes are busy."""
    tasks = [asyncio.create_task(checker.check(one, caller)) for one in constraints]
    await asyncio.sleep(0)
    working = min(len(constraints), module.OF_A_CALLER)
    await until(lambda: sum(c.has_process for c in checks(checker, caller).values()) >= working)
    return tasks


def checks(checker: ConstraintChecker, caller: bytes) -> dict[Constraint, Any]:
    return checker._callers[caller].checks


async def leave(*tasks: asyncio.Task[Constraint]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_check_without_waiting_callers_is_given_up(folder: Path) -> None:
    """Checks of clients that had left kept the processes busy."""
    async with open_checker(folder, 300.0, ConstraintMetrics(CollectorRegistry())) as opened:
        left = await begun(opened, [*bombs(module.OF_A_CALLER), regex("waits")], b"one")
        await leave(*left)
        assert regex("waits") not in checks(opened, b"one")
        async with asyncio.timeout(PATIENCE_S):
            await opened.check(regex("after"), b"one")
        assert regex("waits") not in opened._known


async def test_who_leaves_gives_his_place_to_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING_OF_A_CALLER", 3)
    async with open_checker(folder, 300.0, ConstraintMetrics(CollectorRegistry())) as opened:
        *working, waits = await begun(opened, [*bombs(2), regex("a")], b"one")
        with pytest.raises(TooManyChecks):
            await opened.check(regex("b"), b"one")
        await leave(waits)
        another = asyncio.create_task(opened.check(regex("b"), b"one"))
        await asyncio.sleep(0)
        assert regex("b") in checks(opened, b"one")
        await leave(another, *working)


async def test_a_caller_that_keeps_processes_busy_delays_no_other(folder: Path) -> None:
    async with open_checker(folder, 300.0, ConstraintMetrics(CollectorRegistry())) as opened:
        flood = await begun(opened, bombs(20), b"one")
        async with asyncio.timeout(PATIENCE_S):
            for i in range(3):
                await opened.check(regex(f"[a-z]{{{i + 2}}}"), b"another")
        assert not any(task.done() for task in flood)
        await leave(*flood)


async def test_a_check_that_is_soon_requested_again_continues(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a client with a shorter time limit than a process's start would never get an answer."""
    monkeypatch.setattr(module, "LEFT_S", 600.0)
    registry = CollectorRegistry()
    async with open_checker(folder, BUDGET_S, ConstraintMetrics(registry)) as opened:
        await leave(*await begun(opened, [regex("again")], b"one"))
        assert await opened.check(regex("again"), b"one") == regex("again")
    assert results(registry)["compiled"] == 1


async def test_a_starting_process_is_kept_when_its_first_caller_leaves(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEFT_S", 0.0)
    async with open_checker(folder, BUDGET_S, ConstraintMetrics(CollectorRegistry())) as opened:
        await leave(*await begun(opened, [regex("leaves")], b"one"))
        await until(lambda: not opened._tasks)
        await opened.check(regex("stays"), b"one")
        assert [sandbox.is_there for sandbox in opened._idle].count(True) == 1
        assert regex("leaves") not in opened._known


async def test_what_another_caller_s_check_found_out_meanwhile_is_not_checked_again(folder: Path) -> None:
    registry = CollectorRegistry()
    async with open_checker(folder, BUDGET_S, ConstraintMetrics(registry)) as opened:
        asked = [opened.check(regex("same"), caller) for caller in (b"1", b"2", b"3", b"4")]
        assert await asyncio.gather(*asked) == [regex("same")] * 4
    assert results(registry)["cached"] >= 1


async def test_a_process_that_was_killed_while_idle_makes_no_constraint_too_complex(folder: Path) -> None:
    """The constraint counted as too complex, for good."""
    async with open_checker(folder, BUDGET_S, ConstraintMetrics(CollectorRegistry())) as checker:
        await checker.check(Constraint(kind="regex", text="a+"))
        started = checker._idle[-1]._process
        assert started is not None
        process = await started
        process.kill()
        await process.wait()
        digits = Constraint(kind="regex", text="[0-9]{3}")
        assert await checker.check(digits) == digits
