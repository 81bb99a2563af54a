"""A browser for tests of the page at /ui: Debian's Chromium, one for each file."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.waiting import PATIENCE_S

CHROMIUM: Final = Path("/usr/bin/chromium")
IMAGES: Final = Path(__file__).resolve().parents[2] / "docs" / "images"
PICTURES: Final = "KVMESH_SCREENSHOTS"  # set: tests write the pictures of docs/ui.md
WIDE: Final = {"width": 1280, "height": 800}
PHONE: Final = {"width": 375, "height": 740}

Browser = Any  # types of playwright, which may be missing
Page = Any
OpenPage = Callable[..., Page]


@pytest.fixture(scope="module")
def browser(nothing_left_behind: None) -> Iterator[Browser]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install -e '.[dev]'")
    if not CHROMIUM.exists():
        pytest.skip(f"{CHROMIUM} is missing: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"], timeout=PATIENCE_S * 1000
        )
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """Open a page in its own context. The test fails if it logs an error or sends a request to another host."""
    faults: list[str] = []
    contexts = []

    def start(url: str, viewport: dict[str, int] = WIDE, **options: Any) -> Page:
        context = browser.new_context(viewport=viewport, reduced_motion="reduce", **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE_S * 1000)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda line: faults.append(line.text) if line.type == "error" else None)
        page.on("request", lambda asked: faults.append(asked.url) if not asked.url.startswith((url, "blob:")) else None)
        page.goto(f"{url}/ui")
        return page

    yield start
    for context in contexts:
        context.close()
    # Chromium logs each answer of 4xx; the page shows them itself
    assert [fault for fault in faults if "status of 40" not in fault] == []


def go(page: Page, part: str) -> None:
    page.evaluate("part => { location.hash = `#/${part}`; }", part)


def until(page: Page, expression: str, value: object = True) -> None:
    """Wait until `expression` is `value`: the page draws a moment after an event.

    Playwright's wait_for_function calls eval(), which the page's security policy forbids.
    """
    ends_s = time.monotonic() + PATIENCE_S
    while (found := page.evaluate(expression)) != value:
        assert time.monotonic() < ends_s, f"{expression} is {found!r} instead of {value!r}"
        page.wait_for_timeout(20)


def picture(page: Page, name: str) -> None:
    """Write a picture of docs/ui.md, if `PICTURES` is set."""
    if os.environ.get(PICTURES):
        IMAGES.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=IMAGES / f"ui-{name}.png")


def width_of(page: Page) -> int:
    """Return the width of the page, including hidden parts."""
    return int(page.evaluate("document.documentElement.scrollWidth"))
