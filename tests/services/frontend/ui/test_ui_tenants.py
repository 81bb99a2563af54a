"""With API keys, a key sees the requests of its own tenant at /ui, and an operator's key those of all."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Final

import httpx
import pytest

from components.api_keys import parse_file, parse_list
from components.telemetry.stored_spans import Span
from services.frontend.keys import KeyRing
from tests.services.frontend.fake_mesh import FakeMesh
from tests.services.frontend.ui.parts import FakeControl, FakeReader, make_page, served, trace

pytestmark = pytest.mark.anyio

FILE: Final = """
[alice]
key = "sk-alice-0123456789"
tenant = "acme"
[amir]
key = "sk-amir-0123456789"
tenant = "acme"
[bob]
key = "sk-bob-0123456789"
[root]
key = "sk-root-0123456789"
operator = true
"""
ACME, BOB, OPEN, BOTH = "a" * 32, "b" * 32, "c" * 32, "d" * 32


def both() -> list[Span]:
    """A trace that a client made of two requests, one of each tenant."""
    first, second = trace(BOTH, tenant="acme"), trace(BOTH, tenant="bob", error="no")
    renamed = [
        replace(span, span_id=f"2{span.span_id}", parent_id=f"2{span.parent_id}" if span.parent_id else None)
        for span in second
    ]
    return [*first, *renamed]


@pytest.fixture
async def http(mesh: FakeMesh) -> AsyncIterator[httpx.AsyncClient]:
    reader = FakeReader([trace(ACME, tenant="acme"), trace(BOB, tenant="bob"), trace(OPEN), both()])
    async with served(mesh, make_page(reader=reader), KeyRing(parse_file(FILE))) as client:
        yield client


async def seen(http: httpx.AsyncClient, name: str) -> dict[str, int]:
    """Trace ids that the key sees, with the number of their spans."""
    headers = {"authorization": f"Bearer sk-{name}-0123456789"}
    listed = (await http.get("/ui/api/requests", headers=headers)).json()
    found = {one["trace_id"]: one["num_spans"] for one in listed["traces"]}
    for trace_id in (ACME, BOB, OPEN, BOTH):
        answers = [await http.get(f"/ui/api/traces/{trace_id}{file}", headers=headers) for file in ("", "/perfetto")]
        assert {answer.status_code for answer in answers} == {200 if trace_id in found else 404}
        if trace_id in found:
            assert len(answers[0].json()["spans"]) == found[trace_id]
    return found


async def test_a_key_sees_the_requests_of_its_own_tenant_alone(http: httpx.AsyncClient) -> None:
    assert await seen(http, "alice") == await seen(http, "amir") == {ACME: 3, BOTH: 3}
    assert await seen(http, "bob") == {BOB: 3, BOTH: 3}


async def test_an_operator_sees_all_requests_also_those_that_came_without_a_key(http: httpx.AsyncClient) -> None:
    assert await seen(http, "root") == {ACME: 3, BOB: 3, OPEN: 3, BOTH: 6}


async def test_a_trace_of_two_tenants_is_summed_up_for_each_without_the_other(http: httpx.AsyncClient) -> None:
    for name, status in (("alice", "ok"), ("bob", "error")):
        headers = {"authorization": f"Bearer sk-{name}-0123456789"}
        listed = (await http.get("/ui/api/requests", headers=headers)).json()
        [one] = [one for one in listed["traces"] if one["trace_id"] == BOTH]
        assert (one["status"], one["tenant"], listed["tenant"]) == (status, one["tenant"], one["tenant"])


async def test_lists_that_are_kept_for_a_second_are_kept_for_each_tenant(http: httpx.AsyncClient) -> None:
    counts = []
    for name in ("root", "bob", "alice", "root"):
        headers = {"authorization": f"Bearer sk-{name}-0123456789"}
        counts.append(len((await http.get("/ui/api/requests", headers=headers)).json()["traces"]))
    assert counts == [4, 2, 2, 4]


def test_no_key_of_the_environment_is_an_operator() -> None:
    assert [key.operator for key in parse_list("alice:sk-alice-0123456789,sk-bob-0123456789")] == [False, False]
    assert [key.operator for key in parse_file(FILE)] == [False, False, False, True]


async def test_a_key_that_becomes_an_operator_sees_all_at_once() -> None:
    ring = KeyRing(parse_file(FILE))
    account = ring.find(b"sk-bob-0123456789")
    assert account is not None
    assert not account.is_operator
    ring.replace(parse_file(FILE.replace('"sk-bob-0123456789"', '"sk-bob-0123456789"\noperator = true')))
    assert account.is_operator


async def test_only_an_operator_kills(mesh: FakeMesh) -> None:
    """With API keys, each tenant could end the worker of all."""
    control = FakeControl()
    async with served(mesh, make_page(control=control), KeyRing(parse_file(FILE))) as http:
        for name, may, status in (("bob", False, 400), ("root", True, 200)):
            headers = {"authorization": f"Bearer sk-{name}-0123456789", "x-kvmesh-ui": "1"}
            assert (await http.get("/ui/api/about", headers=headers)).json() == {"may_kill": may}
            killed = await http.post("/ui/api/kill", json={"instance": "d1"}, headers=headers)
            assert killed.status_code == status
    assert control.killed == ["d1"]
