"""Plots the distributions of a load's times."""

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.load.client import Run


def pyplot() -> Any:
    """Import matplotlib, which only plots need. If it is missing, exit with a hint."""
    try:
        import_module("matplotlib").use("Agg")
        return import_module("matplotlib.pyplot")
    except ImportError:
        sys.exit("--plot needs matplotlib, which is not installed: pip install -e '.[bench]'")


def save_plot(runs: Sequence[tuple[str, Run]], path: Path) -> None:
    """Plot cumulative distributions of TTFT and ITL, a line per run. Raises: OSError, ValueError for an unknown format."""
    figure, axes = pyplot().subplots(1, 2, figsize=(11, 4), layout="constrained")
    for axis, name, times in (
        (axes[0], "TTFT", [run.ttft_s for _, run in runs]),
        (axes[1], "ITL", [run.itl_s for _, run in runs]),
    ):
        for (label, _), values in zip(runs, times, strict=True):
            shares = [(i + 1) / len(values) for i in range(len(values))]
            axis.step([value * 1000 for value in sorted(values)], shares, where="post", label=label)
        axis.set(xlabel=f"{name} (ms)", ylabel="share of all", ylim=(0, 1))
        if any(times):
            axis.set_xscale("log")
        axis.grid(visible=True, alpha=0.3)
        axis.legend()
    figure.savefig(path, dpi=120)
