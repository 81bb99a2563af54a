"""The engine's core answers requests with random schemas: by the mask path, with random tokens."""

import json
from pathlib import Path

from jsonschema import Draft202012Validator

from components.structured.grammar import load_vocabulary, start_matcher
from components.structured.mask import GrammarMask
from components.wire.sampling import Constraint, SamplingParams
from engine.model.mock_model import SPECIAL, mock_dir
from engine.ports import EngineRequest, FinishReason
from tests.components.structured.random_schemas import random_schema
from tests.engine.mock_engine import make_mock
from tests.engine.tiny_engine import Seen, check_pages, prompt

SCHEMAS = 500
BATCH = 50
LONGEST = 400
END = SPECIAL["<|im_end|>"]


def test_answers_to_500_random_schemas_are_valid(tmp_path: Path) -> None:
    vocabulary = load_vocabulary(mock_dir(tmp_path), 258, frozenset({END}))
    complete = 0
    for start in range(0, SCHEMAS, BATCH):
        engine = make_mock(
            tmp_path,
            num_pages=BATCH * (LONGEST // 16 + 2),
            max_running=BATCH,
            max_step_tokens=1000,
            pipeline="on" if start % (2 * BATCH) else "off",
        )
        schemas = {f"r{seed}": random_schema(seed) for seed in range(start, start + BATCH)}
        for i, (name, schema) in enumerate(schemas.items()):
            matcher = start_matcher(vocabulary, Constraint(kind="json_schema", text=json.dumps(schema)))
            assert not matcher.get_error(), schema
            params = SamplingParams(max_tokens=LONGEST, temperature=1.0, seed=i)
            engine.submit(EngineRequest(name, prompt(5, start=i), params, mask=GrammarMask(matcher, -(-258 // 32))))
        seen = Seen()
        while engine.has_work():
            seen.take(engine.step())
        check_pages(engine)
        assert not seen.failed
        for name, schema in schemas.items():
            if seen.finish[name] is FinishReason.LENGTH:
                continue
            complete += 1
            text = bytes(t for t in seen.tokens[name] if t < 256).decode()
            errors = [error.message for error in Draft202012Validator(schema).iter_errors(json.loads(text))]
            assert not errors, f"{text!r} is no answer to {json.dumps(schema)}: {errors}"
    assert complete >= SCHEMAS * 0.97
