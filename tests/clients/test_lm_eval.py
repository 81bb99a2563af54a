"""EleutherAI's harness scores texts against a running mesh: sums of the log-probabilities of echoed prompts."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from tokenizers import Tokenizer

from tests.clients.conftest import SERVED
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.clients, pytest.mark.mesh, pytest.mark.timeout(900)]  # the first run installs packages

QUESTIONS: Final = {
    "The capital of France is": [" Paris.", " London.", " a banana."],
    "Two plus two equals": [" five.", " twelve.", " four."],
    "Die Hauptstadt von Deutschland ist": [" Köln.", " Berlin.", " 東京."],
}
TASK: Final = """
task: choices
dataset_path: json
dataset_kwargs:
  data_files: {{test: {questions}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{answers}}}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""


@pytest.fixture
def samples(client_mesh: str, lm_eval: Path, real_model_dir: Path, tmp_path: Path) -> list[dict[str, Any]]:
    """What the harness wrote down of each question."""
    questions = tmp_path / "questions.jsonl"
    rows = [{"question": question, "answers": answers} for question, answers in QUESTIONS.items()]
    questions.write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "choices.yaml").write_text(TASK.format(questions=questions))
    options = {
        "--model": "local-completions",
        "--model_args": f"model={SERVED},base_url={client_mesh}/v1/completions,tokenizer={real_model_dir},num_concurrent=4",
        "--tasks": "choices",
        "--include_path": str(tmp_path),
        "--output_path": str(tmp_path / "told"),
    }
    done = subprocess.run(
        [lm_eval, "run", "--log_samples", *(x for pair in options.items() for x in pair)],
        env={**os.environ, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"},
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (told,) = tmp_path.glob("told/**/samples_choices_*.jsonl")
    return [json.loads(line) for line in told.read_text().splitlines()]


def test_the_harness_scores_texts_as_the_mesh_does(
    samples: list[dict[str, Any]], client_mesh: str, real_model_dir: Path
) -> None:
    """It asks for a token that it throws away; `max_tokens: 0` gives the same scores without one."""
    tokenizer = Tokenizer.from_file(str(real_model_dir / "tokenizer.json"))

    def score(question: str, answer: str) -> float:
        ids = tokenizer.encode(question + answer).ids
        body = {"model": SERVED, "prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 1}
        told = httpx.post(f"{client_mesh}/v1/completions", json=body, timeout=PATIENCE_S).json()
        assert told["usage"]["completion_tokens"] == 0
        scores: list[float] = told["choices"][0]["logprobs"]["token_logprobs"]
        return sum(scores[len(tokenizer.encode(question).ids) :])

    assert len(samples) == len(QUESTIONS)
    for sample in samples:
        found = [float(score) for (score, _), *_ in sample["resps"]]
        question = sample["doc"]["question"]
        assert found == pytest.approx([score(question, answer) for answer in QUESTIONS[question]], abs=1e-4)
