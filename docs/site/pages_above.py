"""A hook of mkdocs: README.md and others in the repository's root become pages beside those of docs/."""

import re
from pathlib import Path
from typing import Any, Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

REPO: Final = Path(__file__).resolve().parents[2]
ABOVE: Final = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")
UPWARDS: Final = re.compile(rf"\]\(\.\./((?:\.\./)*(?:{'|'.join(map(re.escape, ABOVE))}))")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    for name in ABOVE:
        files.append(File.generated(config, name, abs_src_path=str(REPO / name)))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Links are right in the repository; on the site docs/ and the root are one directory."""
    return markdown.replace("](docs/", "](") if page.file.src_uri in ABOVE else UPWARDS.sub(r"](\1", markdown)
