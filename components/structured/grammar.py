"""Constraints in llguidance's form: vocabulary, options and cost limits."""

from pathlib import Path
from typing import Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from components.wire.sampling import Constraint

# A space, or a newline with indentation; limited, because small models repeat white space endlessly.
WHITESPACE: Final = r"( |\n[ \t]{0,20})"
# All requests of a step wait for each mask. The defaults allow 16 ms for one, these limits 4. A state takes 2 kB.
LIMITS: Final = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=60_000,
    step_max_items=20_000,
    max_lexer_states=50_000,
    max_grammar_size=300_000,
    verbose_errors=False,  # they would quote the text
)
ASCII: Final = "dw"  # ASCII only for \d and \w, as in JSON Schema's patterns
ENDED: Final = ("NoExtension", "EndOfSentence")  # stop reasons of a complete text


def load_vocabulary(
    folder: Path, vocab_size: int | None = None, eos_token_ids: frozenset[int] = frozenset()
) -> LLTokenizer:
    """Load the model's tokens as bytes in a trie. Takes half a second and tens of MB.

    Args:
        folder: contains the model's tokenizer.json.
        vocab_size: number of logits, if it differs from the tokenizer's.
        eos_token_ids: empty: those of the tokenizer.
    Raises: OSError, ValueError, if there is no usable tokenizer.
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
    """Convert EBNF and GBNF grammars to Lark. Raises: ValueError."""
    if constraint.kind != "lark":
        return constraint
    try:
        return Constraint(kind="lark", text=any_to_lark(constraint.text))
    except Exception as exc:  # the parser raises many kinds of exceptions
        raise ValueError(str(exc) or type(exc).__name__) from exc


def start_matcher(vocabulary: LLTokenizer, constraint: Constraint) -> LLMatcher:
    """Compile on any thread, without the GIL. The matcher's `get_error` returns the fault, if any."""
    text = constraint.text
    if constraint.kind == "json_schema":
        grammar = LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": WHITESPACE})
    elif constraint.kind == "regex":
        grammar = LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(text, ASCII)}/")
    else:
        grammar = LLMatcher.grammar_from_lark(text)
    return LLMatcher(vocabulary, grammar, log_level=0, limits=LIMITS)


def fault_of(matcher: LLMatcher) -> str | None:
    """Why an incomplete text cannot continue; None if it can, or is complete."""
    if not matcher.is_stopped() or matcher.stop_reason() in ENDED:
        return None
    return matcher.get_error() or matcher.stop_reason()
