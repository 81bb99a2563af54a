"""Drafts from known answers."""

import random
from collections.abc import Mapping, Sequence

from engine.core.engine_core import EngineCore
from tests.engine.tiny_engine import VOCAB, Seen

Texts = Sequence[Sequence[int]]


class Oracle:
    """Returns the right tokens, but a wrong one in `lies` (0: never)."""

    max_drafts = 64  # only the scheduler's limits apply

    def __init__(self, texts: Texts, tokens: Sequence[int], lies: int) -> None:
        self.texts = texts
        self.tokens = tokens
        self.lies = lies
        self.draw = random.Random(len(tokens))

    def drafts(self, most: int, least_chance: float) -> list[int]:
        here = len(self.tokens)
        known = next((text for text in self.texts if list(text[:here]) == list(self.tokens)), self.tokens)
        drafts = list(known[here : here + max(most, 0)])
        return [(token + 1) % VOCAB if self.lies and self.draw.randrange(self.lies) == 0 else token for token in drafts]


def guided(engine: EngineCore, texts: Texts, lies: int = 0) -> EngineCore:
    engine._make_drafter = lambda tokens, _: Oracle(texts, tokens, lies)
    engine._always_drafts = True
    engine._pipelined = False
    return engine


def at_no_cost(engine: EngineCore) -> EngineCore:
    """Let it check drafts at any cost: on a busy machine measured times vary."""
    engine._row_cost = None
    return engine


def texts_of(seen: Seen, prompts: Mapping[str, Sequence[int]]) -> list[list[int]]:
    """Prompts and answers, also those of further branches."""
    texts = [[*prompts[name], *tokens] for name, tokens in seen.tokens.items()]
    return texts + [[*prompts[name], *tokens] for (name, _), tokens in seen.branches.items()]
