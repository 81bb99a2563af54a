"""A constraint in llguidance's terms: the vocabulary it is matched against, and how much it may cost."""

from pathlib import Path
from typing import Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from components.wire.sampling import Constraint

# Where JSON has room: a space, or a new line and its indentation. With any white space small models go on making room.
WHITESPACE: Final = r"( |\n[ \t]{0,20})"
# What one mask may cost is paid by all requests of a step: the defaults allow 16 ms, these 4. Memory goes by states, of 2 kB.
LIMITS: Final = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=60_000,
    step_max_items=20_000,
    max_lexer_states=50_000,
    max_grammar_size=300_000,
    verbose_errors=False,  # they would tell of the text so far
)
ASCII: Final = "dw"  # what these stand for in a regular expression, as in the patterns of JSON Schema
ENDED: Final = ("NoExtension", "EndOfSentence")  # why a matcher stops whose text is whole


def load_vocabulary(
    folder: Path, vocab_size: int | None = None, eos_token_ids: frozenset[int] = frozenset()
) -> LLTokenizer:
    """The tokens of the model in `folder`, as bytes in a trie; half a second, tens of MB.

    Args:
        folder: with the model's tokenizer.json.
        vocab_size: of the model's logits, where its tokenizer has no more tokens; default: the tokenizer's.
        eos_token_ids: that end a text; default: what the tokenizer takes for it.
    Raises: OSError, ValueError, when there is no such tokenizer, or it is of another kind.
    """
    described = (folder / "tokenizer.json").read_text()
    ends = sorted(eos_token_ids) or None
    try:
        return LLTokenizer(described, n_vocab=vocab_size, eos_token=ends)
    except ValueError:  # fewer logits than tokens
        if vocab_size is None:
            raise
        return LLTokenizer(described, eos_token=ends)


def as_lark(constraint: Constraint) -> Constraint:
    """The same, with a grammar in EBNF or GBNF, as users of vLLM write it, turned into Lark. Raises: ValueError."""
    if constraint.kind != "lark":
        return constraint
    try:
        return Constraint(kind="lark", text=any_to_lark(constraint.text))
    except Exception as exc:  # a parser in plain Python, which breaks in many ways on what it does not expect
        raise ValueError(str(exc) or type(exc).__name__) from exc


def start_matcher(vocabulary: LLTokenizer, constraint: Constraint) -> LLMatcher:
    """Before the first token. On any thread, without the GIL; what is wrong is in its `get_error`."""
    text = constraint.text
    if constraint.kind == "json_schema":
        grammar = LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": WHITESPACE})
    elif constraint.kind == "regex":
        grammar = LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(text, ASCII)}/")
    else:
        grammar = LLMatcher.grammar_from_lark(text)
    return LLMatcher(vocabulary, grammar, log_level=0, limits=LIMITS)


def fault_of(matcher: LLMatcher) -> str | None:
    """Why the text cannot go on, though it is not whole; None, when it can or is."""
    if not matcher.is_stopped() or matcher.stop_reason() in ENDED:
        return None
    return matcher.get_error() or matcher.stop_reason()
