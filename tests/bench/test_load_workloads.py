import itertools
import json
import random
import statistics
from pathlib import Path

import pytest

from bench.load.replay import trace_requests
from bench.load.workloads import (
    PlannedRequest,
    poisson_times_s,
    random_requests,
    shared_prefix_requests,
    sharegpt_requests,
)

DRAW = random.Random(5)


def check_lengths(planned: list[PlannedRequest]) -> None:
    assert all(len(request.prompt.split()) == request.input_len for request in planned)


def test_a_range_ratio_is_the_shortest_over_the_longest() -> None:
    planned = random_requests(DRAW, 400, 100, 40, 0.25)
    check_lengths(planned)
    assert (min(a.input_len for a in planned), max(a.input_len for a in planned)) == (25, 100)
    assert (min(a.output_len for a in planned), max(a.output_len for a in planned)) == (10, 40)
    assert {(a.input_len, a.output_len) for a in random_requests(DRAW, 9, 100, 40, 1.0)} == {(100, 40)}
    assert {a.input_len for a in random_requests(DRAW, 9, 1, 1, 0.0)} == {1}, "never an empty prompt"


def test_lengths_like_sharegpts_have_these_means_a_tail_and_a_bound() -> None:
    planned = sharegpt_requests(DRAW, 4000, 161, 338, 100_000)
    check_lengths(planned[:50])
    assert statistics.fmean(a.input_len for a in planned) == pytest.approx(161, rel=0.12)
    assert statistics.fmean(a.output_len for a in planned) == pytest.approx(338, rel=0.12)
    assert statistics.median(a.input_len for a in planned) < 100, "a tail of long ones"
    bounded = sharegpt_requests(DRAW, 500, 161, 338, 256)
    assert max(a.input_len + a.output_len for a in bounded) == 256
    assert min(a.output_len for a in bounded) >= 1


def test_a_group_shares_its_system_prompt_and_nothing_else() -> None:
    planned = shared_prefix_requests(DRAW, 3, 5, 40, 12, 7)
    check_lengths(planned)
    assert {(a.input_len, a.output_len) for a in planned} == {(52, 7)}
    groups: dict[str, set[str]] = {}
    for request in planned:
        prefix, question = " ".join(request.prompt.split()[:40]), " ".join(request.prompt.split()[40:])
        groups.setdefault(prefix, set()).add(question)
    assert sorted(len(questions) for questions in groups.values()) == [5, 5, 5]
    assert len({" ".join(prefix.split()[:16]) for prefix in groups}) == 3


def test_poisson_arrivals_have_the_rate_and_the_spread_of_their_gaps() -> None:
    times = list(itertools.islice(poisson_times_s(random.Random(1), 4.0), 5000))
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert times[0] == 0.0
    assert statistics.fmean(gaps) == pytest.approx(0.25, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.07), "an even pace would have none"


def trace(path: Path, *requests: tuple[int, int, int, list[int]]) -> Path:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_text("\n".join(json.dumps(dict(zip(names, request, strict=True))) for request in requests) + "\n")
    return path


@pytest.mark.parametrize("scale", [1.0, 0.05, 0.013])
def test_equal_blocks_of_a_trace_are_equal_words_and_the_share_seen_before_is_kept(
    tmp_path: Path, scale: float
) -> None:
    path = trace(
        tmp_path / "t",
        (0, 1500, 100, [0, 1, 2]),
        (3000, 1300, 60, [0, 1, 3]),
        (9000, 1530, 1, [0, 1, 2]),
        (9001, 9, 9, [7]),
    )
    first, second, third, other = trace_requests(path, None, scale, 2.0, salt=1)
    check_lengths([first, second, third, other])
    assert [a.at_s for a in (first, second, third)] == [0.0, 1.5, 4.5]
    assert (first.input_len, first.output_len) == (max(1, round(1500 * scale)), max(1, round(100 * scale)))
    shared = round(1024 * scale)
    assert first.prompt.split()[:shared] == second.prompt.split()[:shared]
    tails = first.prompt.split()[shared:], second.prompt.split()[shared:]
    assert tails[0][: len(tails[1])] != tails[1]
    assert third.prompt.startswith(first.prompt), "a short last block is the beginning of the whole one"
    assert trace_requests(path, 1, scale, 2.0, salt=2)[0].prompt != first.prompt, "another run, other words"
    assert len(trace_requests(path, 2, scale, 2.0, salt=2)) == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no requests"),
        ("nonsense\n", ":1 is not a request of a trace"),
        ('{"timestamp": 0}\n', ":1 is not a request of a trace: KeyError"),
        ('{"timestamp": 0, "input_length": 900, "output_length": 1, "hash_ids": [4]}\n', "1 blocks for 900 tokens"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_by_its_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "t").write_text(text)
    with pytest.raises(ValueError, match=said):
        trace_requests(tmp_path / "t", None, 1.0, 1.0, salt=1)
