"""The pages of the documentation, and the commands in their blocks of code."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

REPO: Final = Path(__file__).resolve().parents[2]
PAGES: Final = [*sorted(REPO.glob("*.md")), *sorted((REPO / "docs").rglob("*.md"))]
BLOCK: Final = re.compile(r"^```(\w*)\n(.*?)^```$|((?:^    [^\n]*\n|^[ ]*\n)+)", re.MULTILINE | re.DOTALL)
PROMPT: Final = "$ "
SHELL: Final = ("", "bash", "sh", "console", "shell")
ASSIGNMENT: Final = re.compile(r"[A-Z]\w*=")
PLACEHOLDER: Final = re.compile(r"…|\.\.\. |<\w+>")  # of a command


class Command(NamedTuple):
    variables: dict[str, str]  # set before its name
    words: list[str]

    @property
    def program(self) -> str:
        """The name without its directory."""
        return self.words[0].rpartition("/")[2] if self.words else ""


def blocks(text: str) -> Iterator[str]:
    """Yield each indented block, and each fenced one of the shell."""
    for language, fenced, indented in BLOCK.findall(text):
        if indented.strip():
            yield re.sub(r"^    ", "", indented, flags=re.MULTILINE)
        elif fenced and language in SHELL:
            yield fenced


def lines(block: str) -> Iterator[str]:
    """Yield the shell's lines, without output. Quotations and lines with a backslash at the end continue."""
    prompted = any(line.startswith(PROMPT) for line in block.splitlines())
    unfinished = ""
    for line in block.splitlines():
        if not unfinished and prompted and not line.startswith(PROMPT):
            continue
        whole = f"{unfinished}{line if unfinished else line.removeprefix(PROMPT)}"
        if whole.endswith("\\"):
            unfinished = whole[:-1]
        elif is_open(whole):
            unfinished = f"{whole}\n"
        else:
            unfinished = ""
            yield whole


def is_open(line: str) -> bool:
    try:
        shlex.split(line, comments=True)
    except ValueError:
        return True
    return False


def commands(text: str) -> Iterator[Command]:
    """Parse each line of a block as a command; the caller filters by program."""
    for block in blocks(text):
        for line in lines(block):
            words = shlex.split(line, comments=True)
            count = next((i for i, word in enumerate(words) if not ASSIGNMENT.match(word)), len(words))
            variables = dict(word.split("=", 1) for word in words[:count])
            yield Command(variables, words[count:])
