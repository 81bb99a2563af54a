"""The observer behind its real server, with our sender and the SDK's exporter."""

import asyncio
import gzip
import json
from base64 import b64encode
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from pydantic import ValidationError

from components.errors import Rejected
from components.http.server import serve_http
from components.settings import MeshSettings
from components.startup import WrongSettings
from components.telemetry.light_span import LightSpan
from components.telemetry.otlp_encoder import encode_request, encode_resource, encode_span, span_field
from components.telemetry.otlp_sender import OBSERVER, OTLP, OtlpSender
from components.telemetry.packed_spans import PackedSpan
from components.telemetry.span_export import SpanExport
from components.telemetry.spans import Spans, step
from components.telemetry.trace_pieces import PIECES, Piece, Pieces, pack_pieces
from components.telemetry.trace_reader import (
    Beginning,
    LocalTraceReader,
    ObserverTraceReader,
    TracesUnavailable,
    open_trace_reader,
)
from components.telemetry.trace_store import TraceWriter
from services.observer.app import ObserverApp
from services.observer.config import ObserverSettings
from services.observer.otlp import unzipped
from tests.loop_gap import MAX_GAP_S, longest_gap
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.anyio
TRACES = "/v1/traces"
PROTOBUF = {"content-type": "application/x-protobuf"}
JSON = {"content-type": "application/json"}


@asynccontextmanager
async def observer(home: Path, **settings: Any) -> AsyncIterator[str]:
    read = ObserverSettings(port=0, state_dir=home, **settings)
    with closing(ObserverApp(read)) as app:
        async with serve_http(app, read) as url:
            yield url


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    async with observer(tmp_path) as listening:
        yield listening


def client_of(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=PATIENCE_S)


@pytest.fixture
async def http(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(url) as client:
        yield client


def request_of(name: str = "chat tiny", error: str = "", **attributes: Any) -> bytes:
    """An OTLP request with a trace of one span, the root of a request."""
    made: list[LightSpan] = []
    facts = {"kvmesh.request_id": f"id-{name}", **attributes}
    span = Spans(made.append).start_span(name, kind=SpanKind.SERVER, attributes=facts)
    if error:
        span.set_status(StatusCode.ERROR, error)
    span.end()
    resource = encode_resource({"service.name": "kvmesh-frontend", "service.instance.id": "f1"})
    return encode_request(resource, [span_field(encode_span(made[0]))])


async def test_traces_are_listed_newest_first_and_by_what_befell_them(url: str, http: httpx.AsyncClient) -> None:
    for body in (
        request_of("one"),
        request_of("two", **{"kvmesh.slow": True, "kvmesh.ttft_s": 2.5}),
        request_of("three", error="no decode instance"),
    ):
        assert (await http.post(TRACES, content=body, headers=PROTOBUF)).status_code == 200
    reader = ObserverTraceReader(url)
    recent = await asyncio.to_thread(reader.listed)
    assert [trace.name for trace in recent] == ["three", "two", "one"]
    [slow] = await asyncio.to_thread(reader.listed, "slow")
    assert (slow.name, slow.slow, slow.ttft_s, slow.status) == ("two", True, 2.5, "ok")
    [failed] = await asyncio.to_thread(reader.listed, "failed")
    assert (failed.name, failed.status, failed.error) == ("three", "error", "no decode instance")
    for key in (failed.trace_id, failed.trace_id[:10], failed.request_id):
        [span] = await asyncio.to_thread(reader.spans, key)
        assert (span.name, span.service) == ("three", "frontend-f1")
    assert await asyncio.to_thread(reader.spans, "nothing/begins so") == []
    assert await asyncio.to_thread(reader.listed, "recent", 1) == recent[:1]


async def test_a_tenants_traces_are_listed_alone(url: str, http: httpx.AsyncClient) -> None:
    for body in (
        request_of("one", **{"kvmesh.tenant": "acme"}),
        request_of("two", **{"kvmesh.tenant": "o'neill & sons"}),
        request_of("three"),
    ):
        assert (await http.post(TRACES, content=body, headers=PROTOBUF)).status_code == 200
    reader = ObserverTraceReader(url)
    for tenant, names in (("acme", ["one"]), ("o'neill & sons", ["two"]), ("nobody", [])):
        assert [trace.name for trace in await asyncio.to_thread(reader.listed, "recent", 9, tenant)] == names
    assert len(await asyncio.to_thread(reader.listed, "recent", 9)) == 3


def keep_long_trace(home: Path, num_requests: int) -> str:
    """Write a trace with one span for each request, of two tenants in turn; return its id."""
    trace_id = "ab" * 16
    writer = TraceWriter(ObserverSettings(state_dir=home).home)
    for first in range(0, num_requests, 1000):
        numbers = range(first, min(first + 1000, num_requests))
        facts = {number: {"kvmesh.tenant": "acme" if number % 2 else "other"} for number in numbers}
        spans = [PackedSpan(n + 1, 0, f"n{n}", n + 1, n + 9, 0, "", facts[n], []) for n in numbers]
        assert writer.write("frontend-f1", [Piece(trace_id, first + 1, len(spans), msgspec.msgpack.encode(spans))])
    writer.close()
    return trace_id


async def test_a_trace_of_many_requests_does_not_block_the_event_loop(tmp_path: Path) -> None:
    """Its spans were made into JSON in the event loop, so that processes could not send theirs."""
    trace_id = keep_long_trace(tmp_path, 40_000)
    async with observer(tmp_path) as url, client_of(url) as http, longest_gap() as gap:
        answer = await http.get(f"/api/traces/{trace_id}")
    assert len(answer.json()["spans"]) == 40_000
    assert gap[0] < MAX_GAP_S, gap


async def test_of_a_trace_of_many_requests_the_first_spans_are_read_and_the_others_counted(tmp_path: Path) -> None:
    trace_id = keep_long_trace(tmp_path, 100)
    async with observer(tmp_path) as url:
        reader = ObserverTraceReader(url)
        whole = await asyncio.to_thread(reader.beginning, trace_id, 1000)
        some = await asyncio.to_thread(reader.beginning, trace_id, 10)
        of_one = await asyncio.to_thread(reader.beginning, trace_id, 10, "acme")
        none = await asyncio.to_thread(reader.beginning, "f" * 32, 10)
    assert (len(whole.spans), whole.left_out) == (100, 0)
    assert ([span.name for span in some.spans], some.left_out) == ([f"n{n}" for n in range(10)], 90)
    assert ([span.name for span in of_one.spans], of_one.left_out) == ([f"n{n}" for n in range(1, 20, 2)], 40)
    assert none == Beginning([])


async def test_an_older_observer_sends_all_spans_and_the_reader_chooses(tmp_path: Path) -> None:
    trace_id = keep_long_trace(tmp_path, 100)
    async with observer(tmp_path) as url, client_of(url) as http:
        sent = (await http.get(f"/api/traces/{trace_id}")).content

    async def older(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"server", OBSERVER.encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": sent})

    async with serve_http(older, ObserverSettings(port=0)) as url:
        found = await asyncio.to_thread(ObserverTraceReader(url).beginning, trace_id, 10, "acme")
    assert ([span.name for span in found.spans], found.left_out) == ([f"n{n}" for n in range(1, 20, 2)], 40)


async def test_the_exporter_of_the_sdk_is_taken_as_it_is(url: str) -> None:
    exporter = InMemorySpanExporter()
    resource = Resource.create({"service.name": "shop"})
    span = TracerProvider(resource=resource, shutdown_on_exit=False).get_tracer("x").start_span("GET /")
    span.end()
    exporter.export([span])
    theirs = OTLPSpanExporter(endpoint=f"{url}{TRACES}")
    assert await asyncio.to_thread(theirs.export, exporter.get_finished_spans()) is SpanExportResult.SUCCESS
    theirs.shutdown()  # type: ignore[no-untyped-call]
    [trace] = await asyncio.to_thread(ObserverTraceReader(url).listed)
    [kept] = await asyncio.to_thread(ObserverTraceReader(url).spans, trace.trace_id)
    assert (kept.name, kept.service) == ("GET /", "shop")


async def test_json_and_gzip_are_taken(url: str, http: httpx.AsyncClient) -> None:
    span = {
        "traceId": "ab" * 16, "spanId": "cd" * 8, "parentSpanId": "ef" * 8, "name": "by hand", "kind": 2,
        "startTimeUnixNano": "5", "endTimeUnixNano": "9", "attributes": [{"key": "a", "value": {"intValue": "3"}}],
    }  # fmt: skip
    body = {"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}
    packed = gzip.compress(json.dumps(body).encode())
    headers = {"content-type": "application/json; charset=utf-8", "content-encoding": "gzip"}
    answer = await http.post(TRACES, content=packed, headers=headers)
    assert (answer.status_code, answer.json()) == (200, {})
    [kept] = await asyncio.to_thread(ObserverTraceReader(url).spans, "ab" * 16)
    assert (kept.span_id, kept.parent_id, kept.start_ns, kept.attributes) == ("cd" * 8, "ef" * 8, 5, {"a": 3})


@pytest.mark.parametrize(
    ("body", "headers", "status", "said"),
    [
        (b"\xff\xff\xff", PROTOBUF, 400, "not an ExportTraceServiceRequest"),
        (b"{", JSON, 400, "not valid OTLP JSON"),
        (b"[1]", JSON, 400, "not valid OTLP JSON"),
        (b'{"resourceSpans": [{"scopeSpans": [{"spans": [{"traceId": 5}]}]}]}', JSON, 400, "not valid OTLP JSON"),
        (b"[" * 100_000, JSON, 400, "not valid OTLP JSON"),
        (b"", {"content-type": "text/plain"}, 400, "content-type 'text/plain' is not supported"),
        (b"abc", {**PROTOBUF, "content-encoding": "gzip"}, 400, "the body is not gzip"),
        (gzip.compress(b"abc", mtime=0)[:-4], {**PROTOBUF, "content-encoding": "gzip"}, 400, "its end is missing"),
        (b"abc", {**PROTOBUF, "content-encoding": "br"}, 400, "content-encoding 'br' is not supported"),
        (b"x" * 2000, PROTOBUF, 413, "exceeds 1000 bytes"),
        (gzip.compress(b"x" * 2000, mtime=0), {**PROTOBUF, "content-encoding": "gzip"}, 413, "1000 bytes after decompression"),
    ],
)  # fmt: skip
async def test_bad_input_is_refused_with_its_reason(
    tmp_path: Path, body: bytes, headers: dict[str, str], status: int, said: str
) -> None:
    most = 1000 if status == 413 else 1 << 20
    async with observer(tmp_path, max_body_bytes=most) as url, client_of(url) as http:
        answer = await http.post(TRACES, content=body, headers=headers)
        assert answer.status_code == status
        assert said in answer.text
        assert not await asyncio.to_thread(ObserverTraceReader(url).listed)
        assert (await http.get("/health")).json() == {"ready": True}


async def test_a_span_without_ids_is_rejected_and_the_others_are_kept(url: str, http: httpx.AsyncClient) -> None:
    span = {"traceId": "ab" * 16, "spanId": "cd" * 8, "name": "good", "startTimeUnixNano": "5", "endTimeUnixNano": "9"}
    body = {"resourceSpans": [{"scopeSpans": [{"spans": [span, {**span, "spanId": "cd"}, {**span, "traceId": ""}]}]}]}
    answer = await http.post(TRACES, json=body)
    assert answer.json()["partialSuccess"]["rejectedSpans"] == 2
    assert [trace.name for trace in await asyncio.to_thread(ObserverTraceReader(url).listed)] == ["good"]


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("/api/traces?limit=-1", 400, "limit='-1' is not a number of traces"),
        ("/api/traces?which=odd", 400, "unknown list 'odd': give which=recent, slow, failed"),
        ("/v1/traces", 405, "use POST"),
        ("/", 404, "send spans to /v1/traces, read traces at /api/traces"),
    ],
)
async def test_a_wrong_question_is_answered_with_what_to_do(
    http: httpx.AsyncClient, path: str, status: int, said: str
) -> None:
    answer = await http.get(path)
    assert answer.status_code == status
    assert said in answer.text


async def test_with_a_token_nothing_is_taken_or_shown_without_it(tmp_path: Path) -> None:
    async with observer(tmp_path, token="s3cret") as url, client_of(url) as http:
        basic = f"Basic {b64encode(b'any:s3cret').decode()}"
        for given in ("", "Bearer wrong", "Basic !", f"Basic {b64encode(b'any:wrong').decode()}"):
            headers = {**PROTOBUF, "authorization": given}
            assert (await http.post(TRACES, content=request_of(), headers=headers)).status_code == 401
            assert (await http.get("/api/traces", headers={"authorization": given})).status_code == 401
        for given in (basic, "Bearer s3cret"):
            headers = {**PROTOBUF, "authorization": given}
            assert (await http.post(TRACES, content=request_of(), headers=headers)).status_code == 200
        with_login = url.replace("http://", "http://mesh:s3cret@")
        settings = MeshSettings(otlp_endpoint=with_login, state_dir=tmp_path / "elsewhere")
        reader = await asyncio.to_thread(open_trace_reader, settings)
        assert isinstance(reader, ObserverTraceReader)
        assert len(await asyncio.to_thread(reader.listed)) == 2
        assert "s3cret" not in reader.place
        with pytest.raises(TracesUnavailable, match="requires its token"):
            await asyncio.to_thread(ObserverTraceReader(url).listed)


def test_a_state_directory_that_cannot_be_made_is_a_wrong_setting() -> None:
    """The output was a traceback."""
    with pytest.raises(WrongSettings, match="setting state_dir: cannot make /dev/null/x: Not a directory; set a dir"):
        ObserverApp(ObserverSettings(state_dir=Path("/dev/null/x")))


async def test_a_password_that_is_no_ascii_is_refused_like_a_wrong_one(tmp_path: Path) -> None:
    """The observer answered 500 with a traceback in its log."""
    async with observer(tmp_path, token="s3cret") as url, client_of(url) as http:
        for given in (b"Basic \xe9\xe9", b"Bearer \xe9\xe9"):
            assert (await http.get("/api/traces", headers={b"authorization": given})).status_code == 401


def test_an_address_that_others_reach_needs_a_token() -> None:
    with pytest.raises(ValidationError, match="set MESH_OBSERVER_TOKEN, or listen on"):
        ObserverSettings(host="0.0.0.0")
    assert ObserverSettings(host="0.0.0.0", token="t").host == "0.0.0.0"


@pytest.mark.parametrize("token", ["K7/x0", "a%41b", "a b", "a,b", "ключ", ""])
def test_a_token_that_cannot_stand_in_a_url_is_refused_at_the_start(token: str) -> None:
    """Its senders could not start, or got 401 for each span."""
    with pytest.raises(ValidationError, match=r"only have letters, digits and .* 'openssl rand -hex 32'"):
        ObserverSettings(token=token)
    assert ObserverSettings(token="Az09-._~+=").token is not None


async def test_another_receiver_is_no_observer_and_the_file_is_read(tmp_path: Path) -> None:
    async def other(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async with serve_http(other, ObserverSettings(port=0)) as url:
        settings = MeshSettings(otlp_endpoint=url, state_dir=tmp_path)
        assert isinstance(await asyncio.to_thread(open_trace_reader, settings), LocalTraceReader)


async def test_a_process_that_an_observer_answers_writes_no_file_of_its_own(url: str, tmp_path: Path) -> None:
    def export() -> Mapping[str, int]:
        exporting = SpanExport("frontend-f1", {"service.name": "kvmesh-frontend"}, TraceWriter(home), OtlpSender(url))
        exporting.start()
        Spans(exporting.put).start_span("chat", kind=SpanKind.SERVER).end()
        exporting.stop()
        return exporting.dropped

    home = tmp_path / "of the process"
    assert set((await asyncio.to_thread(export)).values()) == {0}
    assert [trace.name for trace in await asyncio.to_thread(ObserverTraceReader(url).listed)] == ["chat"]
    assert LocalTraceReader(home).listed() == []


async def test_a_process_knows_its_observer_before_its_first_span(url: str, tmp_path: Path) -> None:
    """Metrics were sent to an observer that had not been asked yet, which refused them."""
    export = SpanExport("frontend-f1", {}, TraceWriter(tmp_path / "of the process"), OtlpSender(url))
    assert export.takes_metrics() is None
    export.start()
    await until(lambda: export.is_observed() is not None)
    assert export.is_observed()
    assert export.takes_metrics() is False
    await asyncio.to_thread(export.stop)
    assert await asyncio.to_thread(ObserverTraceReader(url).listed) == []


async def test_a_sender_without_the_token_logs_what_to_do(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The reason was always empty: the observer's texts end with a newline."""
    async with observer(tmp_path, token="s3cret") as url:
        sender = OtlpSender(url)
        await asyncio.to_thread(sender.send, request_of(), OTLP, 1)
        sender.close()
    [reason] = [vars(record)["reason"] for record in caplog.records if "refused" in record.getMessage()]
    assert reason == "this observer requires its token: set it as the password in MESH_OTLP_ENDPOINT"


async def test_bodies_that_are_being_read_count_as_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty-four senders that paused before their last bytes took 400 MB."""
    monkeypatch.setattr("services.observer.app.WAITING_BYTES", 100_000)
    going_on = asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield bytes(60_000)
        await going_on.wait()

    settings = ObserverSettings(port=0, state_dir=tmp_path)
    with closing(ObserverApp(settings)) as app:
        async with serve_http(app, settings) as url, client_of(url) as http:
            first = asyncio.create_task(http.post(TRACES, content=slow(), headers=PROTOBUF))
            await until(lambda: app._waiting_bytes >= 60_000)
            second = await http.post(TRACES, content=bytes(60_000), headers=PROTOBUF)
            assert (second.status_code, "retry later" in second.text) == (503, True)
            await until(lambda: app._waiting_bytes == 60_000)
            going_on.set()
            assert (await first).status_code == 400
            assert app._waiting_bytes == 0


def test_more_than_one_gzip_member_is_refused() -> None:
    """The bytes after the first one were lost, with status 200."""
    with pytest.raises(Rejected, match="more than one gzip member"):
        unzipped(gzip.compress(b"a") + gzip.compress(b"b"), "gzip", 100)


async def test_spans_wait_for_an_observer_that_is_away_and_what_is_too_much_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = request_of()
    monkeypatch.setattr("components.telemetry.otlp_sender.WAITING_BYTES", 10 * len(one))
    async with observer(tmp_path / "first") as url:
        port = httpx.URL(url).port
    sender = OtlpSender(url)
    for number in range(15):
        await asyncio.to_thread(sender.send, request_of(f"n{number:02}"), OTLP, 1)
    assert sender.dropped >= 5
    dropped = sender.dropped
    read = ObserverSettings(port=port, state_dir=tmp_path / "second")
    with closing(ObserverApp(read)) as app:
        async with serve_http(app, read):
            async with asyncio.timeout(PATIENCE_S):
                while not sender.is_observer:
                    await asyncio.sleep(0.05)
                    await asyncio.to_thread(sender.send_waiting)
            kept = await asyncio.to_thread(ObserverTraceReader(url).listed)
    assert [trace.name for trace in kept] == [f"n{number:02}" for number in reversed(range(dropped, 15))]
    assert sender.dropped == dropped
    sender.close()


async def test_a_sender_that_knows_the_observer_sends_pieces_which_are_read_like_otlp(tmp_path: Path) -> None:
    made: list[LightSpan] = []
    tracer = Spans(made.append)
    for name in ("first", "second"):
        with tracer.start_as_current_span(name, kind=SpanKind.SERVER, attributes={"kvmesh.request_id": name}) as span:
            step("step").end()
            span.set_attribute("kvmesh.slow", True)
    async with observer(tmp_path) as url:
        sender = OtlpSender(url)
        for span in made:
            assert sender.takes_pieces is (span is made[1])
            export = SpanExport("frontend-f1", {"service.name": "kvmesh-frontend", "service.instance.id": "f1"},
                                TraceWriter(tmp_path / "own"), sender)  # fmt: skip
            export.put(span)
            await asyncio.to_thread(export.export)
        found = [await asyncio.to_thread(ObserverTraceReader(url).spans, name) for name in ("first", "second")]
        slow = await asyncio.to_thread(ObserverTraceReader(url).listed, "slow")
    sender.close()
    for name, spans in zip(("first", "second"), found, strict=True):
        assert [(span.name, span.service) for span in spans] == [(name, "frontend-f1"), ("step", "frontend-f1")]
    assert [trace.name for trace in slow] == ["second", "first"]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "truncated"),
        (b"\xc0", "Expected `array`"),
        (pack_pieces(Pieces("d", [Piece("no hex", 1, 1, b"")])), "regex"),
        (pack_pieces(Pieces("d", [Piece("0" * 32, 1 << 63, 1, b"")])), "<= 9223372036854775807"),
    ],
)
async def test_pieces_that_are_none_are_refused_with_the_reason(http: httpx.AsyncClient, body: bytes, why: str) -> None:
    answer = await http.post(TRACES, content=body, headers={"content-type": PIECES})
    assert answer.status_code == 400
    assert why in answer.text


async def test_a_piece_whose_spans_are_no_otlp_does_not_hide_the_rest_of_its_trace(
    url: str, http: httpx.AsyncClient
) -> None:
    assert (await http.post(TRACES, content=request_of("one"), headers=PROTOBUF)).is_success
    [whole] = await asyncio.to_thread(ObserverTraceReader(url).listed)
    bad = pack_pieces(Pieces("d", [Piece(whole.trace_id, 1, 1, b"\xff\xff")]))
    assert (await http.post(TRACES, content=bad, headers={"content-type": PIECES})).is_success
    assert [span.name for span in await asyncio.to_thread(ObserverTraceReader(url).spans, whole.trace_id)] == ["one"]
