"""API keys over a real server: which clients are let in, by which spelling of a path, and the limits of each key."""

import asyncio
import json
import os
import signal
import ssl
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from openai import AsyncOpenAI, AuthenticationError, RateLimitError

from components.api_keys import BadKeys, KeyLimits, parse_file, parse_list, read_keys
from components.errors import KeyLimited
from components.followed_files import stamp_of
from components.http.server import serve_http
from components.http.tls import Tls
from components.startup import WrongSettings
from components.wire.embed import EmbeddingModel
from services.frontend import keys as keys_module
from services.frontend.admission import CHECK_INTERVAL_S
from services.frontend.app import create_app
from services.frontend.config import FrontendSettings
from services.frontend.keys import KeyRing, follow_keys, open_keys
from services.frontend.ports import FleetRoom, ServedModel
from services.frontend.quota import Account
from tests.services.frontend.fake_mesh import MODEL, FakeMesh
from tests.services.frontend.raw_http import send
from tests.services.frontend.test_admission_http import FULL
from tests.services.frontend.test_operations import value_of
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.anyio
CHAT: Final = "/v1/chat/completions"
HELLO: Final[dict[str, Any]] = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
ALICE: Final = "sk-alice-0123456789"
BOB: Final = "sk-bob-0123456789"
CAROL: Final = "sk-carol-0123456789"
DAVE: Final = "sk-dave-0123456789"
AUTH: Final = {"authorization": f"Bearer {ALICE}"}


@asynccontextmanager
async def served(mesh: FakeMesh, file: str, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(mesh, KeyRing(parse_file(file)), **settings) as client:
        yield client


@asynccontextmanager
async def serving(mesh: FakeMesh, ring: KeyRing, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    limits = FrontendSettings(port=0, drain_timeout_s=2, **settings)
    app = create_app(mesh, mesh.text, limits, keys=ring)
    async with serve_http(app, limits) as url, httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
        yield client


def table(name: str, key: str, **limits: int | str) -> str:
    return "\n".join(
        [f"[{name}]", f'key = "{key}"', *(f"{what} = {json.dumps(it)}" for what, it in limits.items()), ""]
    )


BOTH: Final = table("alice", ALICE) + table("bob", BOB)


def refused(answer: httpx.Response) -> None:
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.headers["x-request-id"]
    if answer.request.method != "HEAD":
        error = answer.json()["error"]
        if answer.request.url.path.startswith("/v1/messages"):
            assert error["type"] == "authentication_error"
            assert answer.headers["request-id"] == answer.json()["request_id"]
        else:
            assert set(error) == {"message", "type", "param", "code"}
            assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {ALICE}"},
        {"authorization": f"bearer   {BOB}"},
        {"x-api-key": ALICE},
        {"x-api-key": BOB, "authorization": "Bearer"},
    ],
)
async def test_a_good_key_comes_in_as_openais_and_as_anthropics_clients_bring_it(
    mesh: FakeMesh, headers: dict[str, str]
) -> None:
    async with served(mesh, BOTH) as http:
        assert (await http.post(CHAT, json=HELLO, headers=headers)).status_code == 200
        assert (await http.get("/v1/models", headers=headers)).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": "Bearer wrong"},
        {"authorization": f"Basic {ALICE}"},
        {"authorization": ALICE},
        {"authorization": f"Bearer {ALICE}x"},
        {"authorization": f"Bearer {ALICE[:-1]}"},
        {"authorization": f"Bearer {ALICE.upper()}"},
        {"authorization": f"Bearer {sha256(ALICE.encode()).hexdigest()}"},
        {"x-api-key": ""},
        {"x-api-key": b"\xff\xfe"},
        {"cookie": f"authorization=Bearer {ALICE}"},
        {"x-forwarded-for": "127.0.0.1", "x-real-ip": "127.0.0.1"},
    ],
    ids=str,
)
async def test_a_bad_key_or_none_is_401(mesh: FakeMesh, headers: dict[str, str]) -> None:
    async with served(mesh, BOTH) as http:
        refused(await http.post(CHAT, json=HELLO, headers=headers))
        refused(await http.post(CHAT, params={"api_key": ALICE, "key": ALICE}, json=HELLO, headers=headers))
    assert not mesh.prompts


async def test_a_key_in_the_wrong_form_gets_the_right_one(mesh: FakeMesh) -> None:
    """A valid key without "Bearer" was called incorrect."""
    async with served(mesh, BOTH) as http:
        for value in (ALICE, f"Basic {ALICE}", "Bearer"):
            answer = await http.get("/v1/models", headers={"authorization": value})
            assert "Send it as 'Authorization: Bearer <key>'" in answer.json()["error"]["message"]


async def test_a_file_without_keys_is_reported_at_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys.toml"
    file.write_text("")
    async with open_keys(FrontendSettings(api_keys_file=file)):
        assert "there is no API key, so every request is refused" in caplog.messages


@pytest.mark.parametrize(
    "headers",
    [
        [("authorization", "Bearer wrong"), ("authorization", f"Bearer {ALICE}")],
        [("authorization", f"Bearer {ALICE}"), ("authorization", "Bearer wrong")],
        [("authorization", f"Bearer {ALICE}"), ("authorization", f"Bearer {ALICE}")],
        [("x-api-key", "wrong"), ("x-api-key", ALICE)],
        [("x-api-key", ALICE), ("x-api-key", ALICE)],
        [("authorization", "Bearer wrong"), ("x-api-key", ALICE)],
        [("authorization", f"Bearer {BOB}"), ("x-api-key", ALICE)],
    ],
    ids=str,
)
async def test_several_keys_are_400_with_keys_and_without(
    mesh: FakeMesh, http: httpx.AsyncClient, headers: list[tuple[str, str]]
) -> None:
    """The last Authorization header counted. A client that added one to a proxy's got the rights of another key."""
    async with served(mesh, BOTH) as keyed:
        for client in (keyed, http):
            for path in (CHAT, "/v1/messages"):
                answer = await client.post(path, json=HELLO, headers=headers)
                assert answer.status_code == 400
                assert "one API key" in answer.text
            assert (await client.get("/health", headers=headers)).status_code == 200
    assert not mesh.prompts


async def test_one_key_may_come_twice_under_both_names(mesh: FakeMesh) -> None:
    async with served(mesh, BOTH) as http:
        headers = {**AUTH, "x-api-key": ALICE}
        assert (await http.post(CHAT, json=HELLO, headers=headers)).status_code == 200


async def raw(url: httpx.URL, request: str) -> bytes:
    """The answer to a request line and headers that no client would send."""
    reader, writer = await send(str(url), request.encode("latin-1") + b"connection: close\r\ncontent-length: 0\r\n\r\n")
    try:
        return await asyncio.wait_for(reader.read(), PATIENCE_S)
    finally:
        writer.close()


PATHS: Final = [
    "/v1/models", "/v1/chat/completions", "//v1/models", "/v1//models", "/v1/../v1/models", "/health/../v1/models",
    "/health/..;/v1/models", "/health%2f..%2fv1/models", "/%76%31/models", "/v1%2fmodels", "/V1/MODELS", "/v1/models/",
    "/v1/models?x=/health", "/v1/models#/health", "/v1/models;/health", "/health/", "//health", "/health%00", "/metrics",
    "/openapi.json", "*", "/nowhere", "http://127.0.0.1/v1/models", "http://localhost/v1/models",
    "https://health/v1/models", "http://evil//v1/models", "/live/x", "/\x80",
]  # fmt: skip


async def test_no_spelling_of_a_path_no_method_and_no_host_gets_around_the_key(mesh: FakeMesh) -> None:
    hosts = ["127.0.0.1", "localhost", "health", "[::1]", "evil.example:80", "a/health", ""]
    async with served(mesh, BOTH) as http:
        for path in PATHS:
            for method in ("GET", "HEAD", "POST", "OPTIONS", "PUT", "TRACE", "DELETE"):
                host = hosts[(len(path) + len(method)) % len(hosts)]
                answer = await raw(http.base_url, f"{method} {path} HTTP/1.1\r\nhost: {host}\r\n")
                assert answer[9:12] in {b"401", b"400"}, (method, path, host, answer[:300])
        for host in hosts:
            for extra in (
                "",
                "x-original-url: /health\r\n",
                "x-rewrite-url: /health\r\n",
                "x-http-method-override: GET\r\n",
            ):
                answer = await raw(http.base_url, f"POST {CHAT} HTTP/1.1\r\nhost: {host}\r\n{extra}")
                assert answer.startswith(b"HTTP/1.1 401"), (host, extra, answer[:300])
        assert not mesh.prompts


async def test_what_balancers_ask_is_open_and_nothing_else(mesh: FakeMesh) -> None:
    async with served(mesh, BOTH) as http:
        assert (await http.get("/health")).status_code == 200
        for path in ("/live", "/ready"):
            assert (await http.get(path)).status_code != 401
        for path in (route.path for route in http_routes(mesh)):
            if path not in {"/health", "/live", "/ready"}:
                refused(await http.get(path.replace("{model:path}", MODEL)))
        refused(await http.post("/health"))


async def test_who_brings_no_key_is_told_a_status_and_no_more(mesh: FakeMesh) -> None:
    """`/health` named the models, and `/ready` the parts of the mesh, to clients without a key."""
    wrong = {"authorization": "Bearer sk-wrong-0123456789"}
    async with served(mesh, BOTH) as http:
        for headers in ({}, wrong):
            assert (await http.get("/health", headers=headers)).json() == {"status": "ok"}
            assert (await http.get("/live", headers=headers)).json() == {"status": "ok"}
            assert (await http.get("/ready", headers=headers)).json() == {"status": "ready"}
        assert (await http.get("/health", headers=AUTH)).json() == {"status": "ok", "models": [MODEL]}
        assert (await http.get("/ready", headers=AUTH)).json() == {"status": "ready", "reasons": []}
        mesh.served.clear()
        unready = await http.get("/ready")
        assert (unready.status_code, unready.json()) == (503, {"status": "unready"})
        assert (await http.get("/ready", headers=AUTH)).json()["reasons"] == ["no decode instance is usable"]
        metrics = (await http.get("/metrics", headers=AUTH)).text
    assert 'kvmesh_requests_unauthorized_total{reason="wrong"} 3.0' in metrics  # nobody tries keys unseen
    assert 'kvmesh_requests_unauthorized_total{reason="missing"} 0.0' in metrics


def http_routes(mesh: FakeMesh) -> Sequence[Any]:
    return [route for route in create_app(mesh, mesh.text, FrontendSettings()).routes if hasattr(route, "path")]


async def test_a_key_stands_in_no_log_no_metric_and_no_answer(mesh: FakeMesh, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    async with served(mesh, BOTH) as http:
        mesh.fail_at, mesh.failure = 0, ZeroDivisionError("secret")
        for key in (ALICE, "sk-wrong-0123456789"):
            answer = await http.post(CHAT, json=HELLO, headers={"authorization": f"Bearer {key}"})
            assert "sk-" not in answer.text + str(answer.headers)
        metrics = (await http.get("/metrics", headers=AUTH)).text
        assert "sk-" not in metrics
        assert 'kvmesh_api_key_requests_total{api_key="alice"} 1.0' in metrics
        assert 'kvmesh_requests_unauthorized_total{reason="wrong"} 1.0' in metrics
    ours = [record for record in caplog.records if not record.name.startswith(("httpx", "httpcore"))]
    assert ours
    # without task names: "Task-1" contains "sk-"
    facts = [record.getMessage() + str({**record.__dict__, "taskName": ""}) for record in ours]
    assert not any("sk-" in text for text in facts)
    ring = KeyRing(parse_file(BOTH))
    assert "sk-" not in repr(vars(ring)), "only hashes are kept"
    assert "sk-" not in repr(FrontendSettings(api_keys=f"alice:{ALICE}"))


async def test_requests_at_once_are_limited_by_key(mesh: FakeMesh) -> None:
    mesh.gate = asyncio.Semaphore(0)
    async with served(mesh, table("alice", ALICE, requests_at_once=2) + table("bob", BOB)) as http:
        running = [asyncio.create_task(http.post(CHAT, json=HELLO, headers=AUTH)) for _ in range(2)]
        await until(lambda: mesh.running == 2)
        answer = await http.post(CHAT, json=HELLO, headers=AUTH)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        error = answer.json()["error"]
        assert error["message"] == "Rate limit reached for this API key: 2 requests at once. Try again in 1 s."
        assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
        assert await value_of_with_key(http, 'kvmesh_api_key_limited_total{api_key="alice"}') == 1
        bobs = asyncio.create_task(http.post(CHAT, json=HELLO, headers={"x-api-key": BOB}))
        await until(lambda: mesh.running == 3)
        for _ in range(1000):
            mesh.gate.release()
        assert [a.status_code for a in await asyncio.gather(*running, bobs)] == [200] * 3
        assert (await http.post(CHAT, json=HELLO, headers=AUTH)).status_code == 200


async def test_a_key_at_its_limit_may_cancel(mesh: FakeMesh) -> None:
    """It frees a place. This frontend stores no responses, so it knows none by this id."""
    mesh.gate = asyncio.Semaphore(0)
    async with served(mesh, table("alice", ALICE, requests_at_once=1)) as http:
        running = asyncio.create_task(http.post(CHAT, json=HELLO, headers=AUTH))
        await until(lambda: mesh.running == 1)
        assert (await http.post(CHAT, json=HELLO, headers=AUTH)).status_code == 429
        assert (await http.post("/v1/responses/resp_1/cancel", headers=AUTH)).status_code == 404
        mesh.gate.release()
        running.cancel()


async def value_of_with_key(http: httpx.AsyncClient, series: str) -> float:
    http.headers.update(AUTH)
    try:
        return await value_of(http, series)
    finally:
        del http.headers["authorization"]


async def test_a_client_that_leaves_gives_its_place_back(mesh: FakeMesh) -> None:
    mesh.gate = asyncio.Semaphore(0)
    async with served(mesh, table("alice", ALICE, requests_at_once=1)) as http:
        request = asyncio.create_task(http.post(CHAT, json=HELLO, headers=AUTH))
        await until(lambda: mesh.running)
        request.cancel()
        await mesh.until_idle()
        mesh.gate = None
        assert (await http.post(CHAT, json=HELLO, headers=AUTH)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_headers_tell_what_is_left_as_openais_do_and_past_it_429(mesh: FakeMesh, stream: bool) -> None:
    ring = KeyRing(parse_file(table("alice", ALICE, requests_per_minute=2, tokens_per_minute=10_000)))
    account = ring.find(ALICE.encode())
    assert account is not None
    account._clock = lambda: 0.0
    async with serving(mesh, ring) as http:
        body = {**HELLO, "stream": stream}
        first, second, third = [await http.post(CHAT, json=body, headers=AUTH) for _ in range(3)]
        assert [a.status_code for a in (first, second, third)] == [200, 200, 429]
        assert [a.headers["x-ratelimit-remaining-requests"] for a in (first, second, third)] == ["1", "0", "0"]
        assert {a.headers["x-ratelimit-limit-requests"] for a in (first, second, third)} == {"2"}
        assert first.headers["x-ratelimit-limit-tokens"] == "10000"
        tokens = [int(a.headers["x-ratelimit-remaining-tokens"]) for a in (first, second)]
        assert 10_000 > tokens[0] > tokens[1] > 9_000
        assert 29 < float(first.headers["x-ratelimit-reset-requests"].removesuffix("s")) <= 30
        assert int(third.headers["retry-after"]) in range(25, 31)
        assert third.json()["error"]["type"] == "requests"
        for name in ("x-ratelimit-remaining-requests", "x-ratelimit-limit-tokens"):
            assert name not in (await http.get("/v1/models", headers=AUTH)).headers


async def test_tokens_of_prompts_and_answers_are_counted_by_key_and_past_them_429(mesh: FakeMesh) -> None:
    async with served(mesh, table("alice", ALICE, tokens_per_minute=25)) as http:
        used = (await http.post(CHAT, json=HELLO, headers=AUTH)).json()["usage"]
        assert 2 * used["prompt_tokens"] + used["completion_tokens"] > 25, "else the next one goes through as well"
        answer = await http.post(CHAT, json=HELLO, headers=AUTH)
        assert answer.status_code == 429
        assert answer.json()["error"]["type"] == "tokens"
        assert 1 <= int(answer.headers["retry-after"]) <= 60
        assert len(mesh.prompts) == 1
        for kind, tokens in (("prompt", used["prompt_tokens"]), ("answer", used["completion_tokens"])):
            assert (
                await value_of_with_key(http, f'kvmesh_api_key_tokens_total{{api_key="alice",kind="{kind}"}}') == tokens
            )


async def test_the_openai_package_sees_its_own_errors(mesh: FakeMesh) -> None:
    async with served(mesh, table("alice", ALICE, requests_per_minute=1)) as http:
        base = f"{http.base_url}/v1"
        async with AsyncOpenAI(base_url=base, api_key="wrong", max_retries=0, timeout=PATIENCE_S) as client:
            with pytest.raises(AuthenticationError):
                await client.chat.completions.create(**HELLO)
        async with AsyncOpenAI(base_url=base, api_key=ALICE, max_retries=0, timeout=PATIENCE_S) as client:
            await client.chat.completions.create(**HELLO)
            with pytest.raises(RateLimitError, match="Rate limit reached"):
                await client.chat.completions.create(**HELLO)


async def test_places_in_the_queue_are_shared_by_the_names_of_keys(mesh: FakeMesh) -> None:
    """Two keys of one name cannot be; one key as bearer and as x-api-key is one customer."""
    mesh.fleet = FULL
    async with served(mesh, BOTH, queue_tokens=160) as http:
        waits = [
            asyncio.create_task(http.post(CHAT, json={**HELLO, "seed": 1}, headers=AUTH)),
            asyncio.create_task(http.post(CHAT, json={**HELLO, "seed": 2}, headers={"x-api-key": ALICE})),
        ]
        while await value_of_with_key(http, "kvmesh_num_requests_waiting") < 1:
            await asyncio.sleep(0.01)
        waits.append(asyncio.create_task(http.post(CHAT, json=HELLO, headers={"x-api-key": BOB})))
        shed = list((await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED))[0])
        assert [task.result().status_code for task in shed] == [429]
        assert waits[2] not in shed, "alice has more waiting than bob, so hers goes"
        for wait in waits:
            wait.cancel()


async def test_a_key_that_has_used_what_it_may_takes_nobodys_place(mesh: FakeMesh) -> None:
    async with served(mesh, table("alice", ALICE, tokens_per_minute=25) + table("bob", BOB), queue_tokens=80) as http:
        assert (await http.post(CHAT, json=HELLO, headers=AUTH)).status_code == 200
        mesh.fleet = FULL
        await asyncio.sleep(2 * CHECK_INTERVAL_S)
        waits = asyncio.create_task(http.post(CHAT, json=HELLO, headers={"x-api-key": BOB}))
        await asyncio.sleep(0)  # to ask for the metrics alice's key is lent to every request that is made meanwhile
        async with asyncio.timeout(PATIENCE_S):
            while await value_of_with_key(http, "kvmesh_num_requests_waiting") < 1:
                assert not waits.done(), waits.result().text
                await asyncio.sleep(0.01)
        answer = await http.post(CHAT, json={**HELLO, "priority": -5}, headers=AUTH)
        assert (answer.status_code, answer.json()["error"]["message"].count("Rate limit reached")) == (429, 1)
        assert await value_of_with_key(http, "kvmesh_num_requests_waiting") == 1
        assert not waits.done()
        waits.cancel()


@pytest.mark.parametrize("route", ["chat", "embeddings"])
@pytest.mark.parametrize("end", ["too old", "the client leaves", "admitted"])
async def test_a_prompt_that_never_leaves_the_queue_costs_its_key_nothing(mesh: FakeMesh, route: str, end: str) -> None:
    """Under load, requests that were refused used up the tokens of those that came after."""
    mesh.fleet = FULL
    if route == "embeddings":
        mesh.served = [ServedModel(MODEL, 512, 0, embedding=EmbeddingModel(dimensions=4))]
    path, body = (CHAT, HELLO) if route == "chat" else ("/v1/embeddings", {"model": MODEL, "input": "Hello"})
    queue_timeout_s = 0.1 if end == "too old" else 1000.0
    ring = KeyRing(parse_file(table("alice", ALICE, tokens_per_minute=1000)))
    account = ring.find(ALICE.encode())
    assert account is not None
    account._clock = lambda: 0.0

    def left() -> int:
        return int(dict(account.headers())[b"x-ratelimit-remaining-tokens"])

    async with serving(mesh, ring, queue_timeout_s=queue_timeout_s) as http:
        request = asyncio.create_task(http.post(path, json=body, headers=AUTH))
        await until(lambda: left() < 1000 or request.done())
        assert not request.done()
        if end == "the client leaves":
            request.cancel()
            await until(lambda: left() == 1000)
        elif end == "admitted":
            mesh.fleet = FleetRoom(0, 1000, 0)
            answer = await request
            assert answer.status_code == 200
            assert left() == 1000 - answer.json()["usage"]["total_tokens"]
        else:
            answer = await request
            assert (answer.status_code, answer.headers["x-ratelimit-remaining-tokens"]) == (429, "1000")
    if end != "admitted":
        assert left() == 1000


async def test_a_priority_better_than_a_key_may_ask_for_is_refused_and_none_becomes_its_best(mesh: FakeMesh) -> None:
    keys = table("alice", ALICE, best_priority=3) + table("bob", BOB)
    async with served(mesh, keys, best_priority=0) as http:
        for key, asked, got in (
            (ALICE, None, 3),
            (ALICE, 3, 3),
            (ALICE, 7, 7),
            (BOB, None, 0),
            (BOB, 0, 0),
            (BOB, 5, 5),
        ):
            body = HELLO if asked is None else {**HELLO, "priority": asked}
            assert (await http.post(CHAT, json=body, headers={"x-api-key": key})).status_code == 200
            assert mesh.prompts[-1].priority == got
        for key, asked, best in ((ALICE, 2, 3), (BOB, -1, 0)):
            answer = await http.post(CHAT, json={**HELLO, "priority": asked}, headers={"x-api-key": key})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"], error["code"]) == (400, "priority", "invalid_value")
            assert f"your limit, {best};" in error["message"]


# -- what one account may use, by a clock of our own ------------------------------------------------------------------


def test_what_a_minute_allows_comes_back_evenly_and_a_debt_is_paid_first() -> None:
    now = [100.0]
    account = Account("a", lambda: now[0])
    account.limits = KeyLimits(tokens_per_minute=600)  # ten a second
    account.take(500)
    account.take(400)  # 300 in debt
    now[0] += 29.0
    with pytest.raises(KeyLimited, match="600 tokens a minute") as late:
        account.check_prompt(100)
    assert late.value.retry_after_s == pytest.approx(11.0)
    now[0] += 11.0
    account.check_prompt(100)
    account.take(100)
    now[0] += 3600.0
    assert dict(account.headers())[b"x-ratelimit-remaining-tokens"] == b"600", "never more than a minute's"
    account.check_prompt(5000)
    account.take(5000)  # larger than a minute allows: it goes when all of that is there, and is paid for later
    assert dict(account.headers())[b"x-ratelimit-remaining-tokens"] == b"0"


def test_a_new_limit_holds_at_once_and_what_was_used_stays_used() -> None:
    ring = KeyRing(parse_file(table("alice", ALICE, requests_per_minute=100)))
    account = ring.find(ALICE.encode())
    assert account is not None
    for _ in range(50):
        account.enter()
    ring.replace(parse_file(table("alice", "sk-rotated-0123", requests_per_minute=10)))
    assert ring.find(ALICE.encode()) is None
    assert ring.find(b"sk-rotated-0123") is account
    for _ in range(10):
        account.enter()
    with pytest.raises(KeyLimited, match="10 requests a minute"):
        account.enter()


# -- where keys come from ---------------------------------------------------------------------------------------------


def test_keys_of_an_environment_variable_have_names_or_get_them() -> None:
    def names(listed: str) -> list[str]:
        ring = KeyRing(parse_list(listed))
        return [account.name for key in (ALICE, BOB) if (account := ring.find(key.encode()))]

    alice, bob = names(f"alice:{ALICE}, {BOB}")
    assert alice == "alice"
    assert bob.startswith("key-")
    assert names(BOB) == names(f"{BOB},sk-0123456789-other") == [bob], (
        "its name is not its place: what it stored stays its own"
    )


def test_a_file_may_hold_a_hash_in_place_of_a_key() -> None:
    ring = KeyRing(parse_file(f'[alice]\nsha256 = "{sha256(ALICE.encode()).hexdigest()}"'))
    assert ring.find(ALICE.encode()) is not None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[alice", "not TOML"),
        ("alice = 1", "alice"),
        ("[alice]", "either key or sha256"),
        (f'[alice]\nkey = "{ALICE}"\nsha256 = "{"0" * 64}"', "either key or sha256"),
        ('[alice]\nkey = "short"', "alice.key: it must have 8 to 512 ASCII characters without spaces"),
        ('[alice]\nkey = "with a space in it"', "alice.key: it must have 8 to 512 ASCII characters without spaces"),
        ('[alice]\nsha256 = "AB"', "alice.sha256: it must have 64 hexadecimal digits in lower case"),
        (f'["al ice"]\nkey = "{ALICE}"', "al ice"),
        (table("alice", ALICE, requests_per_minut=5), "requests_per_minut"),
        (table("alice", ALICE, requests_per_minute=0), "requests_per_minute"),
        (table("alice", ALICE) + table("bob", ALICE), "same value"),
    ],
)
def test_keys_that_cannot_be_used_are_named_without_a_word_of_them(text: str, said: str) -> None:
    with pytest.raises(BadKeys, match=said) as refusal:
        KeyRing(parse_file(text))
    assert "sk-" not in str(refusal.value)
    assert "with a space" not in str(refusal.value)


async def test_the_file_is_read_again_when_it_changes_and_on_sighup_and_a_broken_one_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(table("alice", ALICE))
    ring = KeyRing(read_keys(f"env:{BOB}", file))

    monkeypatch.setattr(keys_module, "CHECK_INTERVAL_S", 0.02)
    async with follow_keys(ring, f"env:{BOB}", file, stamp_of(file)):
        await asyncio.sleep(0.05)
        file.write_text(table("alice", "sk-rotated-0123"))
        await until(lambda: ring.find(b"sk-rotated-0123"))
        assert ring.find(ALICE.encode()) is None
        assert ring.find(BOB.encode()) is not None, "those of the environment stay"
        file.write_text("[broken")
        await until(lambda: "the old ones stay valid" in caplog.text)
        file.unlink()
        await asyncio.sleep(0.05)
        assert ring.find(b"sk-rotated-0123") is not None
        file.write_text("")
        await until(lambda: not ring.find(b"sk-rotated-0123"))
    monkeypatch.setattr(keys_module, "CHECK_INTERVAL_S", 1000.0)
    async with follow_keys(ring, None, file, stamp_of(file)):
        await asyncio.sleep(0.02)
        file.write_text(table("alice", ALICE))
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: ring.find(ALICE.encode()))


async def test_a_file_that_changes_while_the_process_starts_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first look was after the first read: a change in between was never seen."""
    file = tmp_path / "keys.toml"
    file.write_text(table("alice", ALICE))
    monkeypatch.setattr(keys_module, "CHECK_INTERVAL_S", 0.01)
    async with open_keys(FrontendSettings(api_keys_file=file)) as ring:
        file.write_text(table("alice", "sk-rotated-at-the-start"))  # before the task that follows the file first runs
        assert ring is not None
        await until(lambda: ring.find(b"sk-rotated-at-the-start"))


def test_all_keys_are_compared_whichever_is_the_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a lookup reveals neither the place of a key nor how much of it was right."""
    compared: list[bytes] = []

    def compare(kept: bytes, brought: bytes) -> bool:
        compared.append(kept)
        return kept == brought

    monkeypatch.setattr("services.frontend.keys.hmac.compare_digest", compare)
    ring = KeyRing(parse_list(",".join(f"sk-0123456789-{i}" for i in range(100))))
    for key in (b"sk-0123456789-0", b"sk-0123456789-99", b"wrong", b""):
        compared.clear()
        ring.find(key)
        assert len(compared) == 100


# -- TLS, pages of other origins, request ids ---------------------------------------------------------------------------


HERE: Final = Path(__file__).parent
CERTIFICATE: Final = Tls(str(HERE / "localhost.cert.pem"), str(HERE / "localhost.key.pem"))


async def test_https_is_served_with_a_certificate_and_http_is_not(mesh: FakeMesh, settings: FrontendSettings) -> None:
    trust = ssl.create_default_context(cafile=CERTIFICATE.certificate)
    mesh.pace_s = 0.001
    async with serve_http(create_app(mesh, mesh.text, settings), settings, tls=CERTIFICATE) as url:
        assert url.startswith("https://127.0.0.1:")
        async with httpx.AsyncClient(base_url=url, verify=trust, timeout=PATIENCE_S) as client:
            answer = await client.post(CHAT, json={**HELLO, "stream": True})
            assert answer.text.endswith("data: [DONE]\n\n")
        async with httpx.AsyncClient(timeout=PATIENCE_S) as stranger:
            with pytest.raises(httpx.ConnectError, match=r"(?i)certificate"):
                await stranger.get(f"{url}/health")
            with pytest.raises(httpx.HTTPError):
                await stranger.get(f"{url}/health".replace("https", "http"))


@pytest.mark.parametrize(
    ("tls", "why"),
    [
        (Tls("/nowhere.pem", CERTIFICATE.key), "--tls-cert /nowhere.pem: No such file or directory"),
        (Tls(CERTIFICATE.certificate, "/nowhere.pem"), "--tls-key /nowhere.pem: No such file or directory"),
        (Tls(CERTIFICATE.certificate, __file__), "cannot serve TLS with .*--tls-key its private key"),
        (Tls(CERTIFICATE.key, CERTIFICATE.certificate), r"cannot serve TLS with .*\(the two files look swapped\)"),
    ],
    ids=["no certificate", "no key", "no PEM", "swapped"],
)
async def test_a_certificate_that_cannot_be_used_is_a_clear_error(
    mesh: FakeMesh, settings: FrontendSettings, tls: Tls, why: str
) -> None:
    """Swapped files said "[Errno 524297]", in a traceback."""
    with pytest.raises(WrongSettings, match=why):
        async with serve_http(create_app(mesh, mesh.text, settings), settings, tls=tls):
            pass


def test_half_of_a_certificate_is_refused() -> None:
    with pytest.raises(ValueError, match="belong together"):
        FrontendSettings(tls_cert="/a.pem")


PREFLIGHT: Final = {
    "origin": "https://chat.example",
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


async def test_pages_of_other_origins_may_not_ask_unless_they_are_named(mesh: FakeMesh) -> None:
    async with served(mesh, BOTH) as http:
        refused(await http.options(CHAT, headers=PREFLIGHT))
        answer = await http.post(CHAT, json=HELLO, headers={**AUTH, "origin": "https://chat.example"})
        assert not any(name.startswith("access-control") for name in answer.headers)


async def test_pages_of_a_named_origin_ask_with_their_key_and_read_errors_too(mesh: FakeMesh) -> None:
    async with served(mesh, BOTH, cors_origins="https://other.example, https://Chat.example/") as http:
        preflight = await http.options(CHAT, headers=PREFLIGHT)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://chat.example"
        assert "authorization" in preflight.headers["access-control-allow-headers"]
        for headers, status in ((AUTH, 200), ({}, 401)):
            answer = await http.post(CHAT, json=HELLO, headers={**headers, "origin": "https://chat.example"})
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == "https://chat.example"
            assert "x-request-id" in answer.headers["access-control-expose-headers"]
            assert "access-control-allow-credentials" not in answer.headers
        local = await http.options(CHAT, headers={**PREFLIGHT, "access-control-request-private-network": "true"})
        assert (local.status_code, local.headers["access-control-allow-private-network"]) == (200, "true")
        evil = {**PREFLIGHT, "origin": "https://evil.example"}
        assert "access-control-allow-origin" not in (await http.options(CHAT, headers=evil)).headers
        assert "access-control-allow-origin" not in (await http.post(CHAT, json=HELLO, headers=evil)).headers


@pytest.mark.parametrize("path", ["/v1/models", f"/v1/models/{MODEL}", "/health"])
async def test_answers_without_an_id_of_their_own_have_the_clients(http: httpx.AsyncClient, path: str) -> None:
    assert (await http.get(path, headers={"x-request-id": "client-7"})).headers["x-request-id"] == "client-7"
    assert len((await http.get(path)).headers["x-request-id"]) == 32


@pytest.mark.parametrize("path", [CHAT, "/nowhere"])
async def test_a_well_formed_request_id_comes_back_and_is_the_key_to_nothing(
    mesh: FakeMesh, http: httpx.AsyncClient, path: str
) -> None:
    for _ in range(2):  # the same one again is nobody's business
        answer = await http.post(path, json=HELLO, headers={"x-request-id": "client-7/a:b"})
        assert answer.headers["x-request-id"] == "client-7/a:b"
    assert all(prompt.request_id != "client-7/a:b" for prompt in mesh.prompts)
    assert len({prompt.request_id for prompt in mesh.prompts}) == len(mesh.prompts)


@pytest.mark.parametrize("given", ["", "a" * 129, "a b", 'a"b', "é", "a\tb", "${jndi:ldap}"])
async def test_any_other_request_id_is_replaced(http: httpx.AsyncClient, given: str) -> None:
    for path in (CHAT, "/nowhere"):
        answer = await http.post(path, json=HELLO, headers={"x-request-id": given.encode()})
        assert len(answer.headers["x-request-id"]) == 32
        assert answer.headers["x-request-id"] != given


async def test_a_thousand_keys_cost_a_request_less_than_a_millisecond() -> None:
    ring = KeyRing(parse_list(",".join(f"sk-0123456789-{i}" for i in range(1000))))
    best = min(_timed(ring) for _ in range(20))
    assert best < 0.002


def _timed(ring: KeyRing) -> float:
    began = time.thread_time()
    ring.find(b"sk-0123456789-999")
    return time.thread_time() - began


async def test_keys_do_not_share_the_prefix_cache_unless_they_belong_together(mesh: FakeMesh) -> None:
    """Another key's `cached_tokens` revealed a client's prompt page by page."""
    keys = BOTH + table("carol", CAROL, tenant="bob") + table("dave", DAVE, tenant="acme")
    async with served(mesh, keys) as http:
        for key, salt in ((ALICE, None), (ALICE, "s"), (BOB, None), (CAROL, None), (DAVE, "bob/")):
            asked = HELLO if salt is None else HELLO | {"cache_salt": salt}
            answer = await http.post(CHAT, json=asked, headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == 200
    assert [prompt.cache_salt for prompt in mesh.prompts] == ["alice/", "alice/s", "bob/", "bob/", "acme/bob/"]


async def test_keys_share_the_prefix_cache_when_they_are_told_to(mesh: FakeMesh) -> None:
    async with served(mesh, BOTH, share_prefix_cache=True) as http:
        for key in (ALICE, BOB):
            assert (await http.post(CHAT, json=HELLO, headers={"authorization": f"Bearer {key}"})).status_code == 200
    assert {prompt.cache_salt for prompt in mesh.prompts} == {""}
