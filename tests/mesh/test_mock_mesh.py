"""The whole mesh with mock engines: every process, NATS, etcd and NIXL are real, and no token may differ.

The tokens of a mock worker depend on the content of its pages. So a page that is lost, or arrives for another request,
gives other tokens than a single engine.
"""

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from components.wire.sampling import SamplingParams
from components.wire.status import Status, StatusRequest
from tests.mesh.harness import Client, MeshProcesses, metric, open_client
from tests.mesh.mocks import (
    MAX_TOKENS,
    MODEL,
    NO_COST,
    branches_of_one_engine,
    no_page_is_lost,
    one_engine,
    random_prompts,
)
from tests.mesh.through_prefill import through_prefill
from tests.waiting import PATIENCE_S, until, wait_until

pytestmark = pytest.mark.mesh


async def _ask(client: Client, prompts: list[list[int]], salt: str, in_flight: int = 32) -> list[list[int]]:
    return await client.generate_all(prompts, MAX_TOKENS, salt, model=MODEL, in_flight=in_flight)


def test_200_prompts_give_the_same_tokens_aggregated_and_disaggregated(mock_mesh: MeshProcesses) -> None:
    prompts = random_prompts(200)
    expected = one_engine(mock_mesh.home, prompts)

    async def run() -> None:
        async with open_client(mock_mesh, MODEL) as client:
            assert await _ask(client, prompts, salt="aggregated") == expected
            await asyncio.to_thread(mock_mesh.start, "prefill", "prefill")
            await client.until_usable("prefill", 2)
            assert await through_prefill(client, lambda salt: _ask(client, prompts, salt)) == expected
            await no_page_is_lost(client)
        assert sum(_computed(r.http) for r in client.book.of_role("prefill")) > 0.5 * sum(map(len, prompts))

    mock_mesh.start("bootstrap", "decode")
    asyncio.run(run())


@pytest.mark.parametrize(("prefill", "decode"), [(16, 64), (128, 16)])
def test_pages_of_different_sizes_change_no_token(mock_mesh: MeshProcesses, prefill: int, decode: int) -> None:
    """Shared prefixes and prefill's chunks end anywhere in a page."""
    prompts = random_prompts(200)
    expected = one_engine(mock_mesh.home, prompts)

    async def run() -> None:
        async with open_client(mock_mesh, MODEL) as client:
            await client.until_usable("prefill", 2)
            assert await through_prefill(client, lambda salt: _ask(client, prompts, salt)) == expected
            await no_page_is_lost(client)
        assert [r.kv.layout.page_size for r in client.prefills.usable() if r.kv] == [prefill, prefill]
        assert sum(_computed(r.http) for r in client.book.of_role("prefill")) > 0.5 * sum(map(len, prompts))

    sizes = {"MESH_PREFILL_ENGINE__PAGE_SIZE": str(prefill), "MESH_DECODE_ENGINE__PAGE_SIZE": str(decode)}
    mock_mesh.start("bootstrap", "decode", "prefill", "prefill", MESH_ENGINE__MAX_STEP_TOKENS="100", **sizes)
    asyncio.run(run())


def test_a_fitting_page_size_excuses_no_other_difference(mock_mesh: MeshProcesses) -> None:
    """Decode logs the difference, with both values, and computes prompts itself."""
    prompts = random_prompts(20)
    expected = one_engine(mock_mesh.home, prompts)

    async def run() -> None:
        async with open_client(mock_mesh, MODEL) as client:
            [prefill] = await client.until_usable("prefill")
            assert await _ask(client, prompts, salt="refused") == expected
            assert _computed(prefill.http) == 0

    unlike = {"MESH_PREFILL_ENGINE__PAGE_SIZE": "64", "MESH_PREFILL_ENGINE__MOCK__LAYERS": "5"}
    mock_mesh.start("bootstrap", "decode", "prefill", **unlike)
    asyncio.run(run())
    assert "(layers: 4 here, 5 there)" in mock_mesh.one("decode").logged()


def test_a_long_queue_at_prefill_is_passed_by(mock_mesh: MeshProcesses) -> None:
    """Prefill computes 500 tokens per second here, decode at once, so decode computes a prompt queued behind 3,000 tokens."""
    prompts = [[i + 1] * 200 for i in range(20)]
    sampling = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    expected = [ids[:4] for ids in one_engine(mock_mesh.home, prompts, sampling)]

    async def run() -> None:
        async with open_client(mock_mesh, MODEL) as client:
            [prefill] = await client.until_usable("prefill")
            [decode] = await client.until_usable("decode")
            ask = [asyncio.create_task(client.generate(p, 4, model=MODEL)) for p in prompts[:15]]

            def is_known() -> bool:
                news = client.prefills.prompt_load(prefill.instance_id)
                return news.queued_tokens > 2000 and news.tokens_per_s > 0

            await until(is_known, lambda: client.prefills.prompt_load(prefill.instance_id))
            assert _computed(decode.http) == 0
            behind = await asyncio.gather(*(client.generate(p, 4, model=MODEL) for p in prompts[15:]))
            assert _computed(decode.http) == 5 * 200
            assert [*await asyncio.gather(*ask), *behind] == expected
            assert _computed(decode.http) == 5 * 200
            await no_page_is_lost(client)

    waits = {"MESH_TRANSFER_TIMEOUT_S": "30"}  # the last prompt in the queue waits for seven seconds
    mock_mesh.start("bootstrap", "decode", MESH_DECODE_LOCAL_PREFILL_ON_QUEUE="true", **waits)
    slow = {"SPEEDUP": "1", "PROMPT_TOKEN_S": "0.002", "STEP_S": "0"}
    mock_mesh.start("prefill", **waits, **{f"MESH_ENGINE__MOCK__{name}": value for name, value in slow.items()})
    asyncio.run(run())


def _computed(url: str | None) -> float:
    return metric(url, "kvmesh_prompt_tokens_total")


def test_streams_that_move_go_on_with_the_tokens_they_would_have_had(mock_mesh: MeshProcesses) -> None:
    """Two of three decode instances are killed in turn, with 24 streams of 8 requests.

    Each branch moves alone, and its tokens and log-probabilities continue with its own seed.
    """
    prompts = random_prompts(8)
    drawn = SamplingParams(max_tokens=400, temperature=0.7, seed=11, ignore_eos=True, n=3, logprobs=2)
    expected = branches_of_one_engine(mock_mesh.home, prompts, drawn)
    sampling = SamplingParams(max_tokens=400, temperature=0.7, seed=11, ignore_eos=True, n=3, logprobs=2)
    pace = {"MESH_ENGINE__MOCK__SPEEDUP": "1", "MESH_ENGINE__MOCK__STEP_S": "0.01"}

    async def run() -> None:
        async with open_client(mock_mesh, MODEL) as client:
            await client.until_usable("prefill")
            await client.until_usable("decode", 3)
            streams = [asyncio.create_task(client.branches(p, sampling, model=MODEL)) for p in prompts]
            for victim in [w for w in mock_mesh.workers if w.role == "decode"][:2]:
                await asyncio.sleep(0.5)
                assert not any(stream.done() for stream in streams)
                victim.kill()
            assert await asyncio.gather(*streams) == expected
            await no_page_is_lost(client)

    mock_mesh.start("bootstrap", "prefill", "decode", "decode", "decode", **pace, **NO_COST)
    asyncio.run(run())


async def _each_status_is_reported(client: Client) -> None:
    async def status_of(role: str) -> Status:
        [record] = client.book.of_role(role)
        status = await client.bus.call(f"{record.subject}.status", StatusRequest(), Status, timeout_s=PATIENCE_S)
        assert (status.instance_id, status.epoch, status.role) == (record.instance_id, record.epoch, role)
        assert status.pid == record.pid
        assert abs(status.now_unix_s - time.time()) < 60
        return status

    statuses = {role: await status_of(role) for role in ("frontend", "bootstrap", "prefill", "decode")}
    decode, prefill = statuses["decode"], statuses["prefill"]
    [into], [out] = decode.links, prefill.links
    assert (into.peer, out.peer) == (prefill.instance_id, decode.instance_id)
    assert (into.transfers, into.failures, into.bytes) == (out.transfers, out.failures, out.bytes)
    assert out.transfers >= 1
    assert out.bytes > 0
    assert decode.layout == prefill.layout != ""
    assert decode.kv_transfer == prefill.kv_transfer == "nixl/UCX"
    assert decode.queues == dict.fromkeys(("accepted", "waiting", "running", "prealloc", "transfer", "pinned"), 0)
    assert decode.pages is not None
    assert decode.pages.total == decode.pages.free + decode.pages.cached + decode.pages.held
    assert decode.pages.exposed == 0
    assert statuses["frontend"].queues == {"admission": 0}
    assert statuses["frontend"].breakers == {decode.instance_id: "closed"}
    assert decode.breakers == {prefill.instance_id: "closed", statuses["bootstrap"].instance_id: "closed"}
    assert set(decode.heartbeat_ages_s) == {prefill.instance_id}


def _generated(url: str) -> float:
    return metric(url, "kvmesh_generation_tokens_total")


def test_a_pool_too_small_for_all_of_them_answers_everyone_in_turn(mock_mesh: MeshProcesses) -> None:
    """60 requests need ten times the pages of the pool: reservations queue, decodes are preempted."""
    prompts = random_prompts(60)
    expected = one_engine(mock_mesh.home, prompts)

    async def run() -> None:
        async with open_client(mock_mesh, MODEL) as client:
            await client.until_usable("prefill")
            assert await _ask(client, prompts, salt="small", in_flight=60) == expected
            await no_page_is_lost(client)

    mock_mesh.start("bootstrap", "prefill", "decode", MESH_ENGINE__NUM_PAGES="64", MESH_ENGINE__RESERVE_TOKENS="0")
    asyncio.run(run())


def test_a_worker_has_loaded_no_torch(mock_mesh: MeshProcesses) -> None:
    mock_mesh.preloaded = None
    [worker] = mock_mesh.start("decode")
    maps = Path(f"/proc/{worker.popen.pid}/maps").read_text()
    assert "libtorch" not in maps
    assert "nixl" in maps


def test_the_frontend_speaks_the_mocks_bytes_and_a_stop_string_ends_its_branch_alone(mock_mesh: MeshProcesses) -> None:
    """Each token is a letter, and its log-probability is that of a single engine."""
    prompt, count = [*b"Once upon a time, there was "], 400
    drawn = SamplingParams(max_tokens=count, temperature=1.0, seed=3, ignore_eos=True, n=3, logprobs=2)
    [whole] = branches_of_one_engine(mock_mesh.home, [prompt], drawn)
    texts = [bytes(answer.token_ids).decode() for answer in whole]
    stop = next(
        s for i in range(10, 60) if all((s := texts[1][i : i + 3]) not in text for text in (texts[0], texts[2]))
    )
    shown = texts[1].partition(stop)[0]
    pace = {"MESH_ENGINE__MOCK__SPEEDUP": "1", "MESH_ENGINE__MOCK__STEP_S": "0.01"}
    *_, frontend = mock_mesh.start("bootstrap", "prefill", "decode", "frontend", **pace)
    wait_until(frontend.models)
    body = {"model": MODEL, "prompt": prompt, "max_tokens": count, "ignore_eos": True, "temperature": 1.0, "seed": 3}
    body |= {"n": 3, "logprobs": 2, "stop": stop}

    async def ask(decode_http: str, salt: str) -> tuple[Any, float]:
        """Return the answer, and the number of tokens generated before it."""
        before = await asyncio.to_thread(_generated, decode_http)
        url, salted = f"{frontend.url}/v1/completions", body | {"cache_salt": salt}
        answer = await asyncio.to_thread(lambda: httpx.post(url, json=salted, timeout=PATIENCE_S))
        return answer.json(), before

    async def run() -> tuple[Any, float]:
        async with open_client(mock_mesh, MODEL) as client:
            await client.until_usable("prefill")
            [decode] = client.decodes.usable()
            http = decode.http
            assert http is not None
            answer, before = await through_prefill(client, lambda salt: ask(http, salt))
            await no_page_is_lost(client)
            await _each_status_is_reported(client)
            return answer, await asyncio.to_thread(_generated, http) - before

    answer, generated = asyncio.run(run())
    assert [choice["text"] for choice in answer["choices"]] == [texts[0], shown, texts[2]]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length", "stop", "length"]
    counted = len(shown) + len(stop)
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (
        len(prompt),
        2 * count + counted,
    )
    for choice, right, length in zip(answer["choices"], whole, (count, counted, count), strict=True):
        assert choice["logprobs"]["token_logprobs"] == [token.logprob for token in right.logprobs[:length]]
        assert "".join(choice["logprobs"]["tokens"]) == bytes(right.token_ids[:length]).decode()
    assert generated < 3 * count - 50, "it generated after the stop string"
