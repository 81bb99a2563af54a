"""The documentation as a site: every page is linked, and every link has a target."""

import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest

REPO: Final = Path(__file__).resolve().parents[2]
PAGES: Final = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")
needs_mkdocs = pytest.mark.skipif(
    find_spec("mkdocs") is None or find_spec("material") is None, reason="pip install -e '.[docs]'"
)


def build(repo: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(repo / "docs/site/mkdocs.yml")]
    return subprocess.run([*command, "-d", str(site)], check=False, capture_output=True, text=True)


def test_every_page_is_in_the_navigation() -> None:
    text = (REPO / "docs/site/mkdocs.yml").read_text()
    listed = re.findall(r"([\w/.-]+\.md)$", text.partition("\nnav:")[2], re.MULTILINE)
    pages = {str(path.relative_to(REPO / "docs")) for path in (REPO / "docs").rglob("*.md")}
    assert sorted(listed) == sorted({*pages, *PAGES})


def test_every_decision_is_in_their_list() -> None:
    folder = REPO / "docs/decisions"
    text = (folder / "README.md").read_text()
    for page in sorted(folder.glob("[0-9]*.md")):
        title = page.read_text().partition("\n")[0].removeprefix("# ")
        assert f"- [{title}]({page.name})\n" in text


@needs_mkdocs
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    done = build(REPO, tmp_path)
    assert done.returncode == 0, done.stderr
    assert 'href="architecture/"' in (tmp_path / "index.html").read_text()
    assert 'href="../CONTRIBUTING/#glossary"' in (tmp_path / "tour/index.html").read_text()


@needs_mkdocs
def test_a_link_to_nowhere_fails_the_build(tmp_path: Path) -> None:
    """Pages, headings, and headings of README, whose links the site changes."""
    shutil.copytree(REPO / "docs", tmp_path / "docs")
    for name in PAGES:
        shutil.copy(REPO / name, tmp_path)
    links = ("(nothing.md)", "(models.md#nothing)", "(../README.md#nothing)")
    with (tmp_path / "docs/tour.md").open("a") as page:
        page.write("".join(f"\n[broken]{link}\n" for link in links))
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    assert done.stderr.count("tour.md' contains a link") == len(links), done.stderr
