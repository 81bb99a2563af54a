import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

from engine.errors import ModelUnavailable
from engine.model import hub
from engine.model.resolve import independent_name, is_random, model_dir, served_name

REPO = Path(__file__).resolve().parents[3]


def test_a_model_is_served_under_the_name_one_would_expect(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny_dir)
    assert served_name("smollm2-135m") == "smollm2-135m"
    assert served_name("HuggingFaceTB/SmolLM2-135M-Instruct") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert served_name(f"{tiny_dir}/") == "tiny-llama"
    assert served_name(str(tiny_dir / "config.json")) == "tiny-llama"
    assert served_name(".") == "tiny-llama"


def test_a_process_in_another_directory_finds_the_model_by_its_independent_name(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_dir)
    assert independent_name("config.json") == str(tiny_dir / "config.json")
    assert independent_name("mock:.") == f"mock:{tiny_dir}"
    assert [independent_name(name) for name in ("mock", "org/name")] == ["mock", "org/name"]


def test_a_directory_and_its_configuration_are_the_same_place(tiny_dir: Path, tmp_path: Path) -> None:
    assert model_dir(str(tiny_dir), tmp_path) == tiny_dir
    assert model_dir(str(tiny_dir / "config.json"), tmp_path) == tiny_dir
    assert is_random(str(tiny_dir / "config.json"))
    assert not is_random(str(tiny_dir))


@pytest.mark.parametrize("model", ["nonsense", "/no/such/directory", "./nor/this", "a/b/c", "", "org/"])
def test_a_bad_name_is_answered_with_what_one_may_give(model: str, tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match="give one of smollm2-135m, a directory that exists"):
        model_dir(model, tmp_path)


def test_a_directory_without_a_configuration_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match=f"{tmp_path} has no config.json"):
        model_dir(str(tmp_path), tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "\udcff"])
def test_a_configuration_that_is_no_json_object_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content, errors="surrogateescape")
    with pytest.raises(ModelUnavailable, match=f"{tmp_path}/config.json is not the JSON of a model"):
        model_dir(str(tmp_path), tmp_path)


def test_an_id_that_the_hub_would_not_take_is_refused_without_a_traceback(tmp_path: Path) -> None:
    for name in ("Qwen/Qwen3-0.6B.", "org/a--b", "org/a..b", f"org/{'n' * 100}"):
        with pytest.raises(ModelUnavailable, match="this is not a valid hub id"):
            model_dir(name, tmp_path)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (LocalEntryNotFoundError("An error happened.\nCheck it."), "no connection, or no such model. Check both, or "),
        (
            RepositoryNotFoundError(
                "404\n\nNo.", response=httpx.Response(404, request=httpx.Request("GET", "http://h"))
            ),
            "no such model, or ",
        ),
        (OSError(28, "No space left\non device"), "[Errno 28] No space left on device. Check the connection, or "),
    ],
)
def test_a_model_that_cannot_be_fetched_is_one_line_that_begins_with_its_name(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A supervisor shows a message's last line, and the hub's messages have several, without the name in the last."""

    def failing(*_args: object, **_options: object) -> str:
        raise error

    monkeypatch.setattr(hub, "snapshot_download", failing)
    with pytest.raises(ModelUnavailable) as caught:
        model_dir("org/name", tmp_path)
    assert caught.value.message.startswith(f"org/name could not be fetched from the hub: {said}")
    assert "\n" not in caught.value.message


def test_a_fetch_reports_its_progress_and_draws_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def fetch(_model: str, *, tqdm_class: type, **_options: object) -> str:
        with tqdm_class(total=3, desc="Fetching 3 files", name="huggingface_hub.snapshot_download") as bar:
            for _ in range(3):
                bar.update(1)
        return str(tmp_path)

    told: list[tuple[str, int, int]] = []
    monkeypatch.setattr(hub, "snapshot_download", fetch)
    assert model_dir("org/name", tmp_path, lambda *args: told.append(args)) == tmp_path
    assert told == [("Fetching org/name", done, 3) for done in (1, 2, 3)]
    assert capfd.readouterr() == ("", "")


def test_resolving_needs_nothing_that_is_slow_to_load() -> None:
    slow = ("torch", "transformers", "huggingface_hub")
    code = f"import sys; import engine.model.resolve; print([m for m in {slow} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_command_prints_the_directory_alone(tiny_dir: Path) -> None:
    command = [sys.executable, "-m", "engine.model"]
    done = subprocess.run([*command, str(tiny_dir)], cwd=REPO, capture_output=True, text=True, check=True)
    assert done.stdout == f"{tiny_dir}\n"
    failed = subprocess.run([*command, "nonsense"], cwd=REPO, capture_output=True, text=True, check=False)
    assert (failed.returncode, failed.stdout) == (1, "")
    assert "no model 'nonsense'" in failed.stderr
