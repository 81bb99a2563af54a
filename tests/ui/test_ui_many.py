"""The page with 200 instances, behind an API key, and with a made-up mesh and requests."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import pytest

from components.telemetry.trace_summary import summary_of
from tests.conftest import running_services
from tests.services.frontend.ui.parts import LONG_ID, SECRET, TRACE_ID, trace
from tests.ui.conftest import PHONE, WIDE, Browser, OpenPage, Page, go, picture, until, width_of

pytestmark = pytest.mark.mesh
KEY: Final = "sk-one-0123456789"
COUNT: Final = 200
LONG_TASK_MS: Final = 100
WATCHED_MS: Final = 4000
FRONTEND: Final = {"role": "frontend", "state": "up", "started": 1, "pid": 1, "running": 1}
DECODE: Final = {"role": "decode", "state": "up", "started": 1, "pid": 2, "running": 1, "held": 1, "total": 9}
SUMMARY: Final = """Object.fromEntries([...document.querySelectorAll(".summary div")]
  .map(div => [div.querySelector("dt").innerText, div.querySelector("dd").innerText]))"""
# An endless stream of one token; window.asked counts requests.
ONE_TOKEN: Final = """() => {
  const whole = fetch;
  window.asked = 0;
  window.fetch = (path, options) => {
    if (path !== "v1/chat/completions") return whole(path, options);
    window.asked += 1;
    const piece = JSON.stringify({ choices: [{ delta: { content: "word" } }] });
    const body = new ReadableStream({ start: to => to.enqueue(new TextEncoder().encode(`data: ${piece}\n\n`)) });
    return Promise.resolve(new Response(body));
  };
}"""


@pytest.fixture(scope="module")
def urls(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Two frontends: with 200 instances, and with few behind a key."""
    with running_services(tmp_path_factory.mktemp("many")) as start:
        started = {"many": start("tests.ui.serve_many", str(COUNT)), "key": start("tests.ui.serve_many", "6", KEY)}
        for process in started.values():
            process.wait_for_log("url=")
        yield {name: re.findall(r"url=(\S+)", process.logged())[0] for name, process in started.items()}


def task_times_ms(trace: bytes) -> tuple[list[float], list[float]]:
    """Return the durations of the main thread's tasks: processor time, and wall time."""
    events: list[dict[str, Any]] = json.loads(trace)["traceEvents"]
    main = {
        (e["pid"], e["tid"]) for e in events if e["name"] == "thread_name" and e["args"]["name"] == "CrRendererMain"
    }
    tasks = [e for e in events if "RunTask" in e["name"] and (e["pid"], e["tid"]) in main and "tdur" in e]
    return [e["tdur"] / 1000 for e in tasks], [e["dur"] / 1000 for e in tasks]


def test_200_instances_at_30_changes_a_second_make_no_long_task(
    browser: Browser, open_page: OpenPage, urls: dict[str, str], record_property: Callable[[str, object], None]
) -> None:
    """Checks processor time, because on a busy machine any task takes long."""
    page = open_page(urls["many"])
    page.wait_for_selector(".cell.decode")
    assert page.locator(".cell").count() == COUNT - 2
    page.evaluate(
        """() => { window.long = 0;
        new PerformanceObserver(list => { window.long += list.getEntries().length; }).observe({type: "longtask"}); }"""
    )
    updates = "import('./ui/feed.js').then(feed => feed.mesh.updates)"
    before = page.evaluate(updates)
    browser.start_tracing(
        page=page, categories=["toplevel", "devtools.timeline", "disabled-by-default-devtools.timeline"]
    )
    page.wait_for_timeout(WATCHED_MS)
    processor_ms, clock_ms = task_times_ms(browser.stop_tracing())
    taken = page.evaluate(updates) - before
    seen = page.evaluate("window.long")
    figures = (
        f"{taken} changes; tasks: most {max(processor_ms):.0f} ms of the processor, {max(clock_ms):.0f} ms by the clock, "
        f"{sum(processor_ms):.0f} ms in all; {seen} of 50 ms and more by the clock"
    )
    record_property("main thread", figures)
    assert taken > WATCHED_MS / 1000, "the feed stood still"
    assert len(processor_ms) > 20
    assert max(processor_ms) < LONG_TASK_MS, figures
    picture(page, "200")
    page.locator(".cell.silent").first.click()
    page.wait_for_selector(".detail >> text=silent")


def test_200_instances_fit_on_a_phone_and_into_one_stop_of_tab_a_role(
    open_page: OpenPage, urls: dict[str, str]
) -> None:
    page = open_page(urls["many"], PHONE)
    page.wait_for_selector(".cell.decode")
    assert width_of(page) == PHONE["width"]
    assert page.locator(".cell.decode[tabindex='0']").count() == 1
    page.locator(".cell.decode").first.focus()
    page.keyboard.press("End")
    last = page.locator(".cell.decode").last.get_attribute("data-id")
    until(page, "document.activeElement.dataset.id", last)
    assert "Decode" in page.evaluate("document.activeElement.getAttribute('aria-label')")


def test_with_keys_the_page_asks_for_one_and_keeps_it_in_this_tab(open_page: OpenPage, urls: dict[str, str]) -> None:
    page = open_page(urls["key"])
    field = page.get_by_label("Key")
    field.wait_for()
    until(page, "document.activeElement.id", "key")
    field.fill("sk-wrong-0123456789")
    page.keyboard.press("Enter")
    page.get_by_text("Invalid API key.").wait_for()
    field.fill(KEY)
    page.keyboard.press("Enter")
    page.wait_for_selector(".card.decode")
    assert page.evaluate("sessionStorage.getItem('kvmesh.key')") == KEY
    assert page.evaluate("localStorage.length + document.cookie.length") == 0
    page.reload()
    page.wait_for_selector(".card.decode")
    page.get_by_role("button", name="Forget key").click()
    page.get_by_label("Key").wait_for()
    assert page.evaluate("sessionStorage.length") == 0


def test_a_trace_shows_no_word_of_the_client(open_page: OpenPage, urls: dict[str, str]) -> None:
    page = open_page(urls["many"])
    go(page, f"requests/{TRACE_ID}")
    page.wait_for_selector(".waterfall")
    for button in page.locator(".spans button").all():
        button.click()
    text = page.inner_text("main")
    assert "fewest tokens queued" in text
    assert "moved away from d1" in text
    assert SECRET not in text
    assert SECRET not in page.content()


def test_of_a_trace_of_many_requests_the_first_spans_are_shown(open_page: OpenPage, urls: dict[str, str]) -> None:
    page = open_page(urls["many"])
    go(page, f"requests/{LONG_ID}")
    page.wait_for_selector(".waterfall")
    assert page.locator(".spans li").count() == 2000
    assert "4000 later spans are omitted" in page.inner_text("main")
    assert "services.inspect trace eeeeeeeeeeee prints all" in page.inner_text("main")


@dataclass
class MadeUp:
    """The answers of the frontend to the page."""

    instances: dict[str, dict[str, Any]]
    models: list[str] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    traces: list[dict[str, Any]] = field(default_factory=list)

    def answer(self, page: Page) -> None:
        """Answer the page; its feed ends after each snapshot, and is requested again."""
        page.route("**/ui/api/feed", lambda route: route.fulfill(content_type="text/event-stream", body=self._feed()))
        page.route("**/v1/models", lambda route: route.fulfill(json={"data": [{"id": name} for name in self.models]}))
        page.route("**/ui/api/requests?*", lambda route: route.fulfill(json={"place": "here", "traces": self.traces}))

    def _feed(self) -> str:
        about = {"frontend": "f1", "asked": True}
        snapshot = {"instances": self.instances, "links": {}, "about": about, "samples": self.samples}
        return f"event: snapshot\ndata: {json.dumps(snapshot)}\n\n"


def test_without_a_decode_worker_the_page_reports_it_and_continues_when_there_is_one(
    open_page: OpenPage, urls: dict[str, str]
) -> None:
    """It showed "all up" and "running 0"; a chat opened then had no model until a reload."""
    page = open_page(urls["many"])
    made_up = MadeUp({"f1": FRONTEND})
    made_up.answer(page)
    page.reload()
    page.wait_for_selector(".summary .down")
    summary = page.evaluate(SUMMARY)
    assert (summary["state"], summary["requests running"], summary["waiting"]) == ("no decode worker", "0", "1")
    page.evaluate(ONE_TOKEN)
    go(page, "chat")
    page.get_by_label("Message").fill("Hello")
    page.keyboard.press("Enter")
    assert page.evaluate("window.asked") == 0
    assert page.get_by_label("Message").input_value() == "Hello"
    made_up.models, made_up.instances = ["tiny"], {"f1": FRONTEND, "d1": DECODE}
    until(page, "document.querySelector('select').value", "tiny")
    page.get_by_label("Message").press("Enter")
    page.get_by_text("word").wait_for()
    assert page.get_by_text("waiting for a decode worker").count() == 0
    made_up.models, made_up.instances = [], {"f1": FRONTEND}
    page.get_by_text("waiting for a decode worker").wait_for()
    until(page, "/longest gap [1-9][.0-9]* s/.test(document.querySelector('.rhythm canvas').ariaLabel)")
    assert page.evaluate("document.querySelector('select').value") == "tiny"


@pytest.mark.parametrize("viewport", [WIDE, PHONE])
def test_requests_are_listed_with_their_outcome(
    open_page: OpenPage, urls: dict[str, str], viewport: dict[str, int]
) -> None:
    """The list had no outcome, and its columns did not line up on a phone."""
    page = open_page(urls["many"], viewport)
    long = f"request {'9' * 32} is unknown"
    told = {"ok": "", "running": "", "refused": long, "cancelled": "the client left", "error": "no decode instance"}
    made_up = MadeUp({"f1": FRONTEND, "d1": DECODE})
    for number, (status, error) in enumerate(told.items()):
        summary = asdict(summary_of(trace(f"{number}" * 32)))
        ttft = {"ttft_s": 0.0123 * 10**number}
        made_up.traces.append({**summary, **ttft, "status": status, "error": error, "prefill_ids": ["5eed" * 2]})
    made_up.answer(page)
    go(page, "requests")
    page.wait_for_selector(".traces tbody tr")
    outcomes = page.locator(".traces .outcome").all_inner_texts()
    assert outcomes == ["ok", "in progress", "refused", "cancelled", "failed"]
    lefts = "[...document.querySelectorAll('.traces {}')].map(e => Math.round(e.getBoundingClientRect().left))"
    starts = {name: set(page.evaluate(lefts.format(name))) for name in (".ttft", ".prefill", ".total", ".decode")}
    assert all(len(found) == 1 for found in starts.values()), starts
    if viewport is PHONE:
        assert (starts[".ttft"], starts[".total"]) == (starts[".prefill"], starts[".decode"])
    go(page, f"requests/{TRACE_ID}")
    page.wait_for_selector(".requests .waterfall")
    heights = page.evaluate("[...document.querySelectorAll('.traces tbody tr')].map(e => e.offsetHeight)")
    assert max(heights) <= 2 * min(heights)


def test_no_line_is_drawn_over_minutes_without_data(open_page: OpenPage, urls: dict[str, str]) -> None:
    """Lines connected the values before and after a pause."""
    page = open_page(urls["many"])
    numbers = [n for n in range(300) if not 100 < n < 150]  # no sample at all: the frontend was away
    made_up = MadeUp({"f1": FRONTEND, "d1": DECODE})
    made_up.samples = [{"t": 1_700_000_000 + 2 * n, "running": 5, "ttft": [9, 12] if n < 50 or n == 250 else None}
                       for n in numbers]  # fmt: skip
    made_up.answer(page)
    page.reload()
    go(page, "load")
    page.wait_for_selector(".chart canvas >> nth=5")
    # where a chart's first line is drawn, as shares of the width
    drawn = """(chart => {
      const canvas = document.querySelectorAll(".chart canvas")[chart];
      const { data, width, height } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
      const found = new Set();
      for (let i = 0; i < width * height; i += 1) {
        const [r, g, b] = data.slice(4 * i, 4 * i + 3);
        if (data[4 * i + 3] > 128 && b > 180 && r < 80) found.add(i % width);
      }
      return [...found].map(x => x / width);
    })"""
    until(page, f"[0, 3].every(chart => {drawn}(chart).length)")  # charts are drawn before their samples come, too
    ttft, running = page.evaluate(drawn, 0), page.evaluate(drawn, 3)
    assert any(0.8 < x < 0.9 for x in ttft), "a single value is a point"
    assert not any(0.35 < x < 0.75 for x in ttft)
    assert any(x < 0.35 for x in ttft)
    assert not any(0.42 < x < 0.52 for x in running)
    assert any(x > 0.6 for x in running)
