"""Plots simulated runs: distributions, and one bar per policy."""

from collections.abc import Sequence
from math import exp
from pathlib import Path
from typing import Any

from bench.load.plot import pyplot
from bench.simulate.measured import BINS, Measured

POINTS = 400  # points of a curve


def save_plot(runs: Sequence[tuple[str, Measured]], title: str, path: Path) -> None:
    """Plot the runs. Raises: OSError, ValueError for an unknown format."""
    figure, axes = pyplot().subplots(2, 3, figsize=(15, 8), layout="constrained")
    figure.suptitle(title)
    colours = [f"C{i}" for i in range(len(runs))]
    for (name, run), colour in zip(runs, colours, strict=True):
        axes[0][0].plot(*_curve(sorted(run.ttft_s)), label=name, color=colour)
        axes[0][1].plot(*_gaps(run), label=name, color=colour)
    for axis, what in ((axes[0][0], "TTFT"), (axes[0][1], "ITL")):
        axis.set(xlabel=f"{what} (ms)", ylabel="share of all", ylim=(0, 1), xscale="log")
        axis.grid(visible=True, alpha=0.3)
        axis.legend(fontsize="small")
    figures = [run.figures() for _, run in runs]
    spread = next(key for key in ("prefill_spread", "decode_spread") if any(key in figure for figure in figures))
    for axis, key, what in (
        (axes[0][2], "cache_hit", "prompt tokens found in a prefix cache"),
        (axes[1][0], spread, f"load spread, {spread.split('_')[0]} (deviation / mean)"),
        (axes[1][1], "slo", "requests that keep the SLO"),
        (axes[1][2], "goodput_per_worker", "good requests a second and worker"),
    ):
        _bars(axis, [name for name, _ in runs], [figure.get(key, 0.0) for figure in figures], colours, what)
    figure.savefig(path, dpi=120)


def _curve(ordered: Sequence[float]) -> tuple[list[float], list[float]]:
    at = sorted({round(i * (len(ordered) - 1) / POINTS) for i in range(POINTS + 1)}) if ordered else []
    return [ordered[i] * 1000 for i in at], [(i + 1) / len(ordered) for i in at]


def _gaps(run: Measured) -> tuple[list[float], list[float]]:
    ms, shares, below, total = [], [], 0, run.gaps.total()
    for gap in sorted(run.gaps):
        below += run.gaps[gap]
        ms.append(exp((gap + 0.5) / BINS) * 1000)
        shares.append(below / total)
    return ms, shares


def _bars(axis: Any, names: Sequence[str], values: Sequence[float], colours: Sequence[str], what: str) -> None:
    axis.barh(range(len(names)), values, color=colours)
    axis.set_yticks(range(len(names)), names, fontsize="small")
    axis.invert_yaxis()
    axis.set_title(what, fontsize="medium")
    axis.grid(visible=True, axis="x", alpha=0.3)
