"""Files, headings, modules and make targets that the documentation names exist."""

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest

REPO: Final = Path(__file__).resolve().parents[2]
PAGES: Final = [REPO / "README.md", REPO / "CONTRIBUTING.md", *sorted((REPO / "docs").rglob("*.md"))]
LINK: Final = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)")
PATH: Final = re.compile(r"`((?:services|components|engine|tests|bench|deploy|docs)/[\w/.-]+)`")
MODULE: Final = re.compile(r"python -m ((?:services|bench|engine|components|tests)(?:\.\w+)+)")
TARGET: Final = re.compile(r"(?:^    |`)make ([a-z-]+)", re.MULTILINE)


def headings(page: Path) -> set[str]:
    """Return the anchors of a rendered page."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def missing(page: Path) -> Iterator[str]:
    text = page.read_text()
    for path, anchor in LINK.findall(text):
        target = page.parent / path if path else page
        if not target.exists():
            yield f"the linked file {path}"
        elif anchor and anchor not in headings(target):
            yield f"the heading {path}#{anchor}"
    yield from (f"the file {path}" for path in PATH.findall(text) if not (REPO / path).exists())
    for name in MODULE.findall(text):
        module = REPO.joinpath(*name.split("."))
        if not module.with_suffix(".py").exists() and not (module / "__main__.py").exists():
            yield f"the module {name}"
    targets = set(re.findall(r"^([a-z-]+):", (REPO / "Makefile").read_text(), re.MULTILINE))
    yield from (f"make {name}" for name in TARGET.findall(text) if name not in targets)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_exists(page: Path) -> None:
    assert list(missing(page)) == []


def test_a_page_that_names_nothing_real_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "[a](nowhere.md) `docs/nowhere.md` [b](#nothing)\n\n    make nothing\n    python -m bench.nothing\n"
    )
    assert len(list(missing(page))) == 5


def test_the_nouns_of_the_tour_are_classes() -> None:
    named = set(re.findall(r"`([A-Z]\w+)`", (REPO / "docs/tour.md").read_text()))
    sources = [path for top in ("components", "engine", "services") for path in (REPO / top).rglob("*.py")]
    classes = {name for path in sources for name in re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE)}
    assert named
    assert named <= classes


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_have_as_many_columns_below_their_heads_as_in_them(page: Path) -> None:
    """A table of docs/models.md was rendered as raw text."""
    lines = page.read_text().splitlines()
    for head, rule in pairwise(lines):
        if re.fullmatch(r"\|(?: *:?-+:? *\|)+", rule):
            assert len(re.findall(r"(?<!\\)\|", re.sub(r"`[^`]*`", "", head))) == rule.count("|"), head


def test_the_spans_that_the_readme_shows_are_recorded() -> None:
    shown = set(
        re.findall(r"^ +((?:frontend|decode|prefill)\.\w+) +[\d.]+ ", (REPO / "README.md").read_text(), re.MULTILINE)
    )
    sources = "\n".join(path.read_text() for top in ("components", "services") for path in (REPO / top).rglob("*.py"))
    assert len(shown) > 5
    assert {name for name in shown if f'"{name}"' not in sources} == set()


def files_on_the_way() -> list[str]:
    """Return the files of the tour's table, where a folder precedes its modules."""
    table = (REPO / "docs/tour.md").read_text().partition("## All files on the path")[2].partition("## ")[0]
    found: list[str] = []
    for group in re.split(r"[;|\n]", table):
        first, *modules = re.findall(r"`([^`]+)`", group) or [""]
        found += [f"{first}{module}.py" for module in modules] if first.endswith("/") else [first][: bool(first)]
    return found


def test_the_way_of_a_chat_is_at_most_91_files_which_exist() -> None:
    found = files_on_the_way()
    assert [path for path in found if not (REPO / path).is_file()] == []
    assert found.count("engine/sampling/row.py") == found.count("services/frontend/app.py") == 1
    assert 80 <= len(set(found)) == len(found) <= 91
