"""Compare with transformers each of its architectures that generates text, in a tiny form with random weights.

    python -m tests.engine.model.architectures [MODEL_TYPE …]

It prints a line for each: exact, wrong, refused by this engine, or not tried, because transformers could not make or
run such a tiny form of it.
"""

import logging
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from engine.errors import ModelUnavailable, UnsupportedModel
from tests.engine.model.families import LATENT, SIZES, WINDOW, reference, reference_logits, save_model
from tests.engine.model.test_families import paged_logits
from tests.engine.tiny_engine import load_tiny, make_engine, prompt

# Some architectures cannot be made small by the names below.
LIMIT_S: Final = 60
LIMIT_BYTES: Final = 8 * 10**9
ATOL: Final = 2e-4  # of the largest logit
IF_NAMED: Final = {  # by architectures that have them
    "first_k_dense_replace": 1,
    "head_dim": 16,
    "moe_intermediate_size": 48,
    "moe_k": 2,
    "moe_num_experts": 4,
    "moe_topk": 2,
    "n_group": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "topk_group": 1,
}


class TooSlow(Exception):
    """An architecture took more than LIMIT_S."""


@contextmanager
def limited() -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TooSlow(f"not done in {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def tiny(kind: Any) -> Any:
    usual = kind()
    named: dict[str, Any] = {name: value for name, value in IF_NAMED.items() if hasattr(usual, name)}
    if getattr(usual, "sliding_window", None):
        named["sliding_window"] = WINDOW
    if hasattr(usual, "kv_lora_rank"):
        named |= {name: value for name, value in LATENT.items() if hasattr(usual, name)}
    sizes = {name: size for name, size in SIZES.items() if name != "num_key_value_heads" or hasattr(usual, name)}
    return kind(**{**sizes, **named})


def compared(kind: Any, directory: Path) -> str:
    token_ids = prompt(90)
    try:
        saved = save_model(directory, tiny(kind))
        wanted = reference_logits(reference(saved), token_ids)
    except Exception as exc:  # noqa: BLE001 - of any kind, as the architectures are not ours
        return f"not tried: {type(exc).__name__}: {' '.join(str(exc).split())}"
    try:
        loaded = load_tiny(saved, dtype="float32")
        make_engine(loaded)  # refuses what the model does otherwise than it says
    except (ModelUnavailable, UnsupportedModel) as exc:
        return f"refused: {exc}"
    logits = paged_logits(loaded, token_ids, 33, "auto")
    difference = float((logits - wanted).abs().max() / wanted.abs().max())
    return "exact" if difference < ATOL else f"WRONG by {difference:.2g}"


def main() -> int:
    logging.disable(logging.WARNING)
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_BYTES, LIMIT_BYTES))
    asked = set(sys.argv[1:])
    wrong = 0
    for kind in sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING), key=lambda kind: str(kind.model_type)):
        if asked and kind.model_type not in asked:
            continue
        with TemporaryDirectory() as directory:
            try:
                with limited():
                    found = compared(kind, Path(directory) / kind.model_type)
            except TooSlow as exc:
                found = f"not tried: {exc}"
        wrong += found.startswith("WRONG")
        sys.stdout.write(f"{kind.model_type}: {found[:200]}\n")
        sys.stdout.flush()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
