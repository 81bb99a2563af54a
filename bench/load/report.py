"""Prints the figures of a load as a JSON line or a table."""

import os
import platform
import statistics
import time
from collections.abc import Iterator, Sequence
from math import ceil
from typing import Any, Final

from bench.load.client import Run

WIDTH: Final = 78
COLUMNS: Final = ("mean", "median", "p90", "p95", "p99", "max")


def machine_and_date() -> dict[str, str]:
    """Return the machine and date for a JSON line."""
    machine = f"{platform.machine()} {platform.system()}, {os.cpu_count()} cores"
    return {"machine": machine, "date": time.strftime("%Y-%m-%d")}


def quantile_ms(values: Sequence[float], quantile: float) -> float:
    """Return a quantile of values in seconds as milliseconds; 0 if there are none."""
    return round(sorted(values)[max(0, ceil(len(values) * quantile) - 1)] * 1000, 2) if values else 0.0


def figures(run: Run, **facts: Any) -> dict[str, Any]:
    """Return the fields of a JSON line.

    `itl_ms_p99` counts the final event of a text as a token, so that lines are comparable with older ones.
    """
    return {
        **facts,
        "requests": len(run.ttft_s),
        "failed": run.failed,
        "ttft_ms_p50": quantile_ms(run.ttft_s, 0.5),
        "ttft_ms_p90": quantile_ms(run.ttft_s, 0.9),
        "tpot_ms_p50": quantile_ms(run.tpot_s, 0.5),
        "itl_ms_p99": quantile_ms(run.itl_s + run.ends_s, 0.99),
        "output_tok_s": round(run.output_tokens / run.duration_s, 1),
        "req_s": round(len(run.ttft_s) / run.duration_s, 2),
        "tpot_ms_mean": round(statistics.fmean(run.tpot_s) * 1000, 2) if run.tpot_s else 0.0,
        **machine_and_date(),
    }


def more_figures(run: Run) -> dict[str, Any]:
    return {
        "input_tok_s": round(run.prompt_tokens / run.duration_s, 1),
        "input_tokens": run.prompt_tokens,
        "output_tokens": run.output_tokens,
        "duration_s": round(run.duration_s, 2),
        "cut_off": run.cut_off,
        "peak_output_tok_s": round(run.peak_tokens, 1),
        "peak_in_flight": run.peak_in_flight,
        "ttft_ms_p99": quantile_ms(run.ttft_s, 0.99),
        "itl_ms_p50": quantile_ms(run.itl_s, 0.5),
        "e2e_ms_p50": quantile_ms(run.e2e_s, 0.5),
        "e2e_ms_p99": quantile_ms(run.e2e_s, 0.99),
    }


def table(run: Run, title: str) -> str:
    return "\n".join(_lines(run, title))


def _lines(run: Run, title: str) -> Iterator[str]:
    yield f" {title} ".center(WIDTH, "=")
    seconds = run.duration_s
    for name, value in (
        ("Successful requests", f"{len(run.ttft_s)}"),
        ("Failed requests", f"{run.failed}"),
        *([("Cut off by the end of the run", f"{run.cut_off}")] if run.cut_off else []),
        ("Duration (s)", f"{seconds:.2f}"),
        ("Input tokens", f"{run.prompt_tokens}"),
        ("Output tokens", f"{run.output_tokens}"),
        ("Request throughput (req/s)", f"{len(run.ttft_s) / seconds:.2f}"),
        ("Input token throughput (tok/s)", f"{run.prompt_tokens / seconds:.1f}"),
        ("Output token throughput (tok/s)", f"{run.output_tokens / seconds:.1f}"),
        ("Peak output tokens in a second", f"{run.peak_tokens:.1f}"),
        ("Total token throughput (tok/s)", f"{(run.prompt_tokens + run.output_tokens) / seconds:.1f}"),
        ("Mean requests in flight", f"{sum(run.e2e_s) / seconds:.2f}"),
        ("Peak requests in flight", f"{run.peak_in_flight}"),
    ):
        yield f"{name:<40}{value:>12}"
    yield "".join([f"{'ms':-<12}", *(f"{' ' + name:->11}" for name in COLUMNS)])
    for name, values in (("TTFT", run.ttft_s), ("TPOT", run.tpot_s), ("ITL", run.itl_s), ("E2E", run.e2e_s)):
        yield "".join([f"{name:<12}", *(f"{value:>11.2f}" for value in _row(values))])
    yield "=" * WIDTH
    for reason, count in run.reasons.most_common(3):
        yield f"failed {count} times: {reason}"


def _row(values: Sequence[float]) -> list[float]:
    mean = statistics.fmean(values) * 1000 if values else 0.0
    return [mean, *(quantile_ms(values, quantile) for quantile in (0.5, 0.9, 0.95, 0.99, 1.0))]
