"""bench.gpu in its tiny form: every part runs on the CPU, so that on a GPU only CUDA is new."""

import gc
import json
import logging
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import bench.gpu.__main__ as command
from bench.attention_case import AttentionCase, MakeBackend
from bench.engine import Machine
from bench.gpu import correct, engines, steps
from bench.gpu.__main__ import Part, apart, main, run, run_apart, scale_of
from bench.gpu.report import Report, Target, engine_lines
from bench.gpu.scale import CARD, ON_CPU
from bench.gpu.steps import idle_share
from bench.gpu.transfer import transports
from tests.engine.interpreted import without_waste

MACHINE = Machine(copy_bytes_s=1e10, matmul_flop_s=1e11)  # measuring it takes a second


@pytest.fixture(autouse=True)
def _kernels_waste_no_time() -> Iterator[None]:
    with without_waste():
        yield


@pytest.fixture(autouse=True)
def _known_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "measure_machine", lambda _dtype, _device: MACHINE)


def figures(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]


def test_time_in_which_no_kernel_ran_is_idle_and_kernels_may_overlap() -> None:
    assert idle_share([(0, 4), (1, 2), (3, 5), (6, 10)]) == 0.1
    assert idle_share([(7, 8)]) == 0.0


@pytest.mark.parametrize("takes", [True, False])
def test_8_bit_pages_are_checked_only_on_devices_that_take_them(takes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an older GPU their kernels do not compile, which counted as wrong results."""
    checked = set[bool]()

    class Recorded:
        def __init__(self, case: AttentionCase, _make: MakeBackend, _device: str) -> None:
            checked.add(case.eight_bits)

        def check(self) -> float:
            return 0.0

    monkeypatch.setattr(correct, "Outcome", Recorded)
    monkeypatch.setattr(correct, "takes_pages", lambda _device, layout: takes or layout.dtype != "fp8_e4m3")
    assert correct.check_kernels(CARD)
    assert checked == {takes, False}


def test_every_part_of_one_process_runs_and_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    parts = [part for part in Part if part not in {Part.TRANSFER, Part.TP2, Part.MESH_IDS, Part.MESH}]
    report = Report(judged=False)
    assert all(run(parts, ON_CPU, report))
    named = {str(line["figure"]) for line in figures(capsys)}
    assert named == {
        "draws beside the CPU's",
        "kernels against attention written out",
        "engine ready",
        "greedy ids",
        "checksums of KV on the device",
        "evicted pages to main memory and back, GB/s",
        "host's part of a decode step",
        "device",
        "decode attention",
        "prompt attention",
        "prompt attention of torch",
        "decode step",
        "prompt",
        "mixed requests",
        "decode step by sampling",
        "decode step by contexts",
        "idle device",
    }
    assert set(report.values) == {Target.DECODE, Target.PROMPT, Target.SAMPLED, Target.SKEW}


def test_kv_arrives_in_the_other_process_and_its_way_has_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert all(run([Part.TRANSFER], ON_CPU, Report(judged=False)))
    lines = figures(capsys)
    assert [(line["connection"], line["tokens"]) for line in lines] == [
        *(("first", 16), ("first", 64), ("again", 16), ("again", 64))
    ]
    assert all(line["same"] and line["gb_s"] and line["gb_s_scattered"] and line["transport"] for line in lines)


class IdleEngine:
    def close(self) -> None: ...


class IdleBench:
    def __init__(self, engine: IdleEngine, _config: object, _label: str) -> None:
        self.engine = engine

    def decode(self, *_args: object) -> tuple[list[float], list[float]]:
        return [1.0], [1.0]

    def prompt(self, _tokens: int) -> float:
        return 1.0


def test_engines_of_one_and_two_ranks_never_share_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one was alive while the second one measured its memory."""
    made: list[weakref.ref[IdleEngine]] = []
    homes: list[Path] = []

    def build(_model: str, _config: object, state_dir: Path) -> IdleEngine:
        gc.collect()
        assert not any(engine() for engine in made)
        homes.append(state_dir)
        assert all(home.is_dir() for home in homes)
        engine = IdleEngine()
        made.append(weakref.ref(engine))
        return engine

    monkeypatch.setattr(engines, "build_engine", build)
    monkeypatch.setattr(engines, "generate", lambda _engine, _asked: {})
    monkeypatch.setattr(steps, "Bench", IdleBench)
    assert steps.measure_ranks(ON_CPU)
    assert len(made) == 4


@pytest.mark.gpu_bench
def test_two_ranks_give_the_ids_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert all(run([Part.TP2], ON_CPU, Report(judged=False)))
    first, *rest = figures(capsys)
    assert first["same"]
    assert [line["ranks"] for line in rest] == [1, 1, 2, 2]


@pytest.mark.mesh
@pytest.mark.gpu_bench
def test_a_whole_mesh_gives_the_ids_of_one_engine_and_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Report(judged=False)
    assert all(run([Part.MESH_IDS, Part.MESH], ON_CPU, report, tmp_path))
    ids, few, all_of_them, split, whole = figures(capsys)
    assert ids["same"]
    assert (few["transfers"], few["computed_by_decode"]) == (8, 0)
    assert (all_of_them["transfers"], all_of_them["computed_by_decode"]) == (ON_CPU.requests, 0)
    assert {log.name for log in tmp_path.iterdir()} == {"ids.log", "disaggregated.log", "aggregated.log"}
    assert (split["mesh"], whole["mesh"]) == ("disaggregated", "aggregated")
    assert (split["requests"], split["failed"]) == (ON_CPU.requests, 0)
    assert set(report.values) == {Target.LOAD, Target.SPLIT, Target.SPLIT_TTFT}


def test_each_target_is_met_missed_or_not_measured(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(judged=True)
    report.record(Target.DECODE, 1.25)
    report.record(Target.SAMPLED, 1.2)
    report.record(Target.PROMPT, 64_999.0)
    report.record(Target.MOVED, 200.0)
    report.print_targets()
    verdicts = {line["what"]: line["verdict"] for line in figures(capsys)}
    assert [verdicts[target] for target in (Target.DECODE, Target.SAMPLED, Target.PROMPT, Target.MOVED)] == [
        *("met", "missed", "missed", "met")
    ]
    assert verdicts[Target.LOAD] == "not measured"
    assert len(verdicts) == len(Target)


def test_lines_of_the_engine_are_figures(capsys: pytest.CaptureFixture[str]) -> None:
    """The reason why a model was not compiled was lost."""
    log = logging.getLogger("engine.compilation.device")
    with engine_lines():
        logging.getLogger("engine.parts").info("the device's memory is divided", extra={"weights_gb": 8.05, "pages": 7})
        log.info("the compiled model is now used")
        log.warning("the model runs without torch.compile", extra={"reason": "no compiler", "at": Path("here")})
        try:
            raise OSError("no gcc")
        except OSError:
            log.debug("compiling failed", exc_info=True)
    written = capsys.readouterr()
    assert [json.loads(line) for line in written.out.splitlines()] == [
        {"figure": "memory of the device", "weights_gb": 8.05, "pages": 7},
        {
            "figure": "warning",
            "message": "the model runs without torch.compile",
            "reason": "no compiler",
            "at": "here",
        },
    ]
    assert "OSError: no gcc" in written.err


def test_ways_are_read_from_ucxs_table(tmp_path: Path) -> None:
    log = tmp_path / "ucx"
    assert transports(log) == []
    log.write_text("| 0..inf | zero-copy | cuda_ipc/cuda |\n| 0..92 | short | sysv/memory |\nmycuda_ipc\n")
    assert transports(log) == ["cuda_ipc", "sysv"]


def test_without_a_gpu_it_says_what_runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="torch finds none; `--device cpu` runs a tiny form"):
        scale_of("cuda:0")


def test_a_wrong_result_is_a_failed_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "check_checksums", lambda _scale: False)
    with pytest.raises(SystemExit) as ended:
        main([Part.CHECKSUMS], "cpu")
    assert ended.value.code == 1
    assert {line["figure"] for line in figures(capsys)} == {"target"}


def test_parts_that_share_no_engine_have_processes_of_their_own() -> None:
    assert apart([Part.SKEW, Part.IDS, Part.STEPS, Part.KERNELS]) == [
        [Part.KERNELS],
        [Part.IDS],
        [Part.STEPS, Part.SKEW],
    ]
    assert apart([Part.MESH, Part.MESH]) == [[Part.MESH]]
    assert sorted(part for parts in apart(list(Part)) for part in parts) == sorted(Part)


def test_a_process_that_fails_costs_no_figure_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    python = tmp_path / "python"
    python.write_text(
        """#!/bin/sh
        echo '{"figure": "begun"}'
        case "$*" in
            *kernels) exit 3 ;;
            *transfer) echo '{"figure": "target", "what": "a", "value": 1}'; echo '{"figure": "target", "what": "b"}' ;;
            *) echo '{"figure": "target", "what": "a"}'; echo '{"figure": "target", "what": "b", "value": 2}' ;;
        esac
        """
    )
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    assert not run_apart([[Part.KERNELS], [Part.TRANSFER], [Part.HOST]], "cpu")
    begun = {"figure": "begun"}
    assert figures(capsys) == [
        begun,
        {"figure": "failed", "parts": ["kernels"], "exit": 3},
        begun,
        {"figure": "target", "what": "a", "value": 1},  # at once: a later part may be killed
        begun,
        {"figure": "target", "what": "b", "value": 2},
    ]
    assert run_apart([[Part.TRANSFER], [Part.HOST]], "cpu")
