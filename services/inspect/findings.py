"""Findings of checks."""

from dataclasses import dataclass
from enum import StrEnum, auto


class Level(StrEnum):
    OK = auto()
    NOTE = auto()  # works, but may surprise
    WRONG = auto()


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    level: Level
    what: str
    do: str = ""


def ok(check: str, what: str) -> Finding:
    return Finding(check, Level.OK, what)


def note(check: str, what: str, do: str) -> Finding:
    return Finding(check, Level.NOTE, what, do)


def wrong(check: str, what: str, do: str) -> Finding:
    return Finding(check, Level.WRONG, what, do)
