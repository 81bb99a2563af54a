"""The page over a real mesh under services.local, in a browser."""

import json
import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from bench.processes import free_port
from tests.conftest import RunService, ServiceProcess, running_services
from tests.mesh.mocks import SHAPE
from tests.ui.conftest import PHONE, PICTURES, Browser, OpenPage, Page, go, picture, until, width_of
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.mesh

TOKENS: Final = 400  # 8 s, in which a worker is killed
ENV: Final = {
    "MESH_ENGINE__MOCK__STEP_S": "0.02",
    "MESH_ENGINE__MOCK__ANSWER_TOKENS": "0",
    "MESH_ENGINE__NUM_PAGES": "512",
    "MESH_DECODE_MAX_LOCAL_PREFILL": "0",
    "MESH_DECODE_LOCAL_PREFILL_ON_QUEUE": "false",
    **{f"MESH_ENGINE__MOCK__{name}": value for name, value in SHAPE.items()},
}
PARTS: Final = ("mesh", "requests", "load", "chat")
# The relative luminance and contrast of WCAG 2.
CONTRAST: Final = """() => {
  const luminance = text => {
    const part = text.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
      .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * part[0] + 0.7152 * part[1] + 0.0722 * part[2];
  };
  const ground = element => {
    for (let at = element; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      if (!colour.endsWith(", 0)")) return colour;
    }
  };
  return [...document.querySelectorAll("main *, header *")]
    .filter(e => [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()) && e.checkVisibility()
      && !e.closest(".unseen, svg, :disabled"))
    .map(e => {
      const [a, b] = [luminance(getComputedStyle(e).color), luminance(ground(e))].sort((x, y) => y - x);
      return [e.textContent.trim().slice(0, 30), (a + 0.05) / (b + 0.05)];
    }).filter(([, contrast]) => contrast < 4.5);
}"""

SERVICES: Final = """[...new Set(
  [...document.querySelectorAll(".requests .span .where")].map(e => e.innerText.split("-")[0]))].sort().join()"""


@dataclass(frozen=True, slots=True)
class Running:
    url: str
    home: Path
    start: RunService
    process: ServiceProcess

    def one_more_decode(self) -> ServiceProcess:
        """Start a decode instance beside those of services.local."""
        facts = json.loads((self.home / "local" / "running.json").read_text())
        env = {"MESH_ETCD_URL": facts["etcd_url"], "MESH_NATS_URL": facts["nats_url"], "MESH_STATE_DIR": str(self.home)}
        return self.start("services.decode", env={**ENV, **env, "MESH_MODEL": "mock", "MESH_LOG_FORMAT": "json"})


@pytest.fixture(scope="module")
def mesh(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    home = tmp_path_factory.mktemp("ui")
    with running_services(home) as start:
        port = free_port()
        options = ["--model", "mock", "--port", str(port), "--decode", "2", "--state-dir", str(home / "state")]
        process = start("services.local", *options, env=ENV)
        process.wait_for_log("Ready:")
        assert f"http://127.0.0.1:{port}/ui" in process.logged()
        url = f"http://127.0.0.1:{port}"
        with requests_to(url, 6 if PICTURES in os.environ else 0):
            yield Running(url, home / "state", start, process)
        assert process.terminate() == 0, process.logged()


@contextmanager
def requests_to(url: str, clients: int) -> Iterator[None]:
    """Keep the mesh busy inside."""
    over = threading.Event()

    def send(number: int) -> None:
        draw = random.Random(number)
        with httpx.Client(timeout=PATIENCE_S) as client:
            while not over.is_set():
                prompt = "The mesh moves pages. " * draw.randint(2, 20) + str(draw.random())
                body = {"model": "mock", "prompt": prompt, "max_tokens": draw.randint(10, 80), "ignore_eos": True}
                client.post(f"{url}/v1/completions", json=body)
                over.wait(draw.random())

    senders = [threading.Thread(target=send, args=(i,)) for i in range(clients)]
    for sender in senders:
        sender.start()
    try:
        yield
    finally:
        over.set()
        for sender in senders:
            sender.join()


def workers(page: Page, role: str) -> list[str]:
    return [str(tile.get_attribute("data-id")) for tile in page.locator(f".card.{role}").all()]


def ask(page: Page, text: str, tokens: int = TOKENS) -> None:
    """Send a message in the chat; the answer has `tokens` tokens."""
    page.get_by_label("do not stop").check()
    page.get_by_label("At most").fill(str(tokens))
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")


def test_an_instance_appears_and_vanishes(open_page: OpenPage, mesh: Running) -> None:
    page = open_page(mesh.url)
    page.wait_for_selector(".card.decode >> nth=1")
    before = workers(page, "decode")
    assert len(before) == 2
    assert len(workers(page, "prefill")) == len(workers(page, "frontend")) == len(workers(page, "bootstrap")) == 1
    more = mesh.one_more_decode()
    page.wait_for_selector(".card.decode.up >> nth=2")
    [new] = set(workers(page, "decode")) - set(before)
    more.popen.send_signal(signal.SIGTERM)
    page.wait_for_selector(f'[data-id="{new}"]', state="detached")
    assert sorted(workers(page, "decode")) == sorted(before)
    more.exit_code()


def test_a_stream_moves_while_the_page_looks_on(open_page: OpenPage, mesh: Running) -> None:
    """A chat, its waterfall, and the button that kills the worker that serves it."""
    page = open_page(mesh.url)
    go(page, "chat")
    page.wait_for_selector(".workers li >> nth=2")
    ask(page, "Tell me a long story.")
    serving = page.locator(".workers li", has_text="serves this answer")
    # A mouse's click would wait until the page is still, on a busy machine after the end of the answer.
    killed = str(serving.evaluate("of => { of.querySelector('button.danger').click(); return of.dataset.id; }"))
    page.get_by_text("killed at").wait_for()
    page.wait_for_selector(f'.workers [data-id="{killed}"]', state="detached")
    page.wait_for_selector(".chat .waterfall")
    rhythm = str(page.locator(".rhythm canvas").get_attribute("aria-label"))
    assert f"tokens {TOKENS}" in rhythm
    assert page.locator(".chat .fault").all_inner_texts() in ([], [""])
    page.get_by_text(f"moved away from {killed}").wait_for()
    mesh.process.wait_for_log("as asked at /ui")
    page.locator(".beside .span >> nth=10").wait_for()
    picture(page, "chat")
    go(page, "mesh")
    page.wait_for_selector(".card.decode.up >> nth=1")  # services.local has started it again
    assert killed not in workers(page, "decode")
    page.locator(".card.prefill").first.click()
    page.wait_for_selector(".detail")
    picture(page, "mesh")


def test_a_request_has_a_waterfall_across_processes_and_reasons(open_page: OpenPage, mesh: Running) -> None:
    page = open_page(mesh.url)
    go(page, "chat")
    page.wait_for_selector(".workers li >> nth=2")
    ask(page, "A short one.", 5)
    page.wait_for_selector(".chat .waterfall")
    go(page, "requests")
    row = page.locator(".traces tbody tr", has_text="chat mock").first
    row.locator("a").click()
    page.wait_for_selector(".requests .waterfall")
    until(page, SERVICES, "bootstrap,decode,frontend,prefill")  # each exports its spans by itself
    page.locator(".requests .choices > li >> nth=1").wait_for()
    reasons = page.locator(".requests .choices > li").all_inner_texts()
    assert len(reasons) == 2
    assert "decode" in reasons[0]
    assert "prefill" in reasons[1]
    page.locator(".requests .span", has_text="prefill.transfer").get_by_role("button").click()
    assert "transfer.bytes" in page.locator(".requests .facts").inner_text()
    with page.expect_download() as download:
        page.get_by_role("button", name="Download trace").click()
    events = json.loads(Path(download.value.path()).read_text())["traceEvents"]
    assert {"chat mock", "prefill.transfer"} <= {event["name"] for event in events}
    with page.expect_popup() as popup:
        page.get_by_role("button", name="Open in Perfetto").click()
    assert popup.value.url.startswith(("https://ui.perfetto.dev", "about:blank", "chrome-error:"))
    popup.value.close()
    picture(page, "requests")
    page.get_by_role("button", name="Failed").click()
    page.get_by_text("There are no traces of failed requests.").wait_for()


def test_load_over_time_is_drawn(open_page: OpenPage, mesh: Running) -> None:
    page = open_page(mesh.url)
    go(page, "load")
    page.wait_for_selector(".chart canvas >> nth=5")
    with requests_to(mesh.url, 2):
        until(
            page,
            "[...document.querySelectorAll('.plot')].some(p => /generated [1-9]/.test(p.getAttribute('aria-label')))",
        )
    assert len(page.locator(".chart").all()) == 6
    picture(page, "load")


def test_an_address_that_changes_while_the_page_is_drawn_first_is_followed(open_page: OpenPage, mesh: Running) -> None:
    page = open_page(mesh.url)
    page.add_init_script("addEventListener('DOMContentLoaded', () => { location.hash = '#/load'; })")
    page.reload()
    page.wait_for_selector(".chart")


def test_text_is_legible_in_light_and_dark(open_page: OpenPage, mesh: Running) -> None:
    grounds: dict[str, str] = {}
    for scheme in ("light", "dark"):
        page = open_page(mesh.url, color_scheme=scheme)
        page.wait_for_selector(".card.decode")
        grounds[scheme] = page.evaluate("getComputedStyle(document.body).backgroundColor")
        for part in PARTS:
            go(page, part)
            page.wait_for_timeout(200)
            assert page.evaluate(CONTRAST) == [], f"{part}, {scheme}"
        go(page, "mesh")
        page.wait_for_selector(".links table")
        if scheme == "dark":
            picture(page, "mesh-dark")
    assert grounds["light"] != grounds["dark"]


def test_nothing_scrolls_sideways_on_a_phone(open_page: OpenPage, mesh: Running) -> None:
    page = open_page(mesh.url, PHONE)
    page.wait_for_selector(".card.decode")
    for part in PARTS:
        go(page, part)
        page.wait_for_timeout(200)
        assert width_of(page) == PHONE["width"], part
    go(page, "mesh")
    page.wait_for_selector(".card.decode")
    picture(page, "phone")
    page.locator(".card.decode").first.click()
    page.wait_for_selector(".detail")
    assert width_of(page) == PHONE["width"]
    go(page, "requests")
    page.locator(".traces a").first.click()
    page.wait_for_selector(".requests .waterfall")
    assert width_of(page) == PHONE["width"]
    page.get_by_role("link", name="All requests").click()
    page.wait_for_selector(".traces tbody tr >> visible=true")


def test_all_can_be_done_by_keyboard(open_page: OpenPage, mesh: Running) -> None:
    page = open_page(mesh.url)
    page.wait_for_selector(".card.decode >> nth=1")

    def focused(what: str) -> Any:
        return page.evaluate(f"document.activeElement.{what}")

    def outline() -> str:
        return str(page.evaluate("getComputedStyle(document.activeElement).outlineStyle"))

    page.keyboard.press("Tab")
    assert focused("textContent") == "Skip to content"
    for title in ("Mesh", "Requests", "Load", "Chat"):
        page.keyboard.press("Tab")
        assert (focused("textContent"), outline()) == (title, "solid")
    roles = []
    for _ in range(4):
        page.keyboard.press("Tab")
        roles.append(focused("className").split()[1])
        assert outline() == "solid"
    assert roles == ["frontend", "bootstrap", "prefill", "decode"]
    first, second = workers(page, "decode")
    assert focused("dataset.id") == first
    page.keyboard.press("ArrowDown")
    assert focused("dataset.id") == second
    page.keyboard.press("Enter")
    page.wait_for_selector(".detail")
    until(page, "document.activeElement.className", "detail")
    assert f"Decode {second}" in focused("getAttribute('aria-label')")
    page.keyboard.press("Tab")
    assert focused("textContent").strip() == "Kill"
    page.keyboard.press("Escape")
    page.wait_for_selector(".detail", state="detached")
    until(page, "document.activeElement.dataset.id", second)
    for part in PARTS:
        go(page, part)
        page.wait_for_timeout(100)
        nameless = page.evaluate(
            """[...document.querySelectorAll("button, a, input, select, textarea, [role=img]")].filter(e =>
            e.checkVisibility() && !(e.getAttribute("aria-label") || e.textContent.trim() || e.labels?.length)).length"""
        )
        assert nameless == 0, part
