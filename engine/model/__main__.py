"""Convert or download a model and print its directory: `python -m engine.model smollm2-135m`."""

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from engine.errors import ModelUnavailable
from engine.model.resolve import model_dir


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.model", description=__doc__)
    parser.add_argument("model", help="smollm2-135m, a directory, a config.json, a GGUF file, or a hub id")
    parser.add_argument("--state-dir", type=Path, default=Path("~/.cache/kvmesh"), help="default: %(default)s")
    args = parser.parse_args()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
            bar = bars.add_task(f"Looking for {args.model}", total=None)

            def show(task: str, done: int, total: int) -> None:
                bars.update(bar, description=task, completed=done, total=total)

            directory = model_dir(args.model, args.state_dir, show)
    except ModelUnavailable as exc:
        sys.stderr.write(f"{exc}\n")
        return 1
    sys.stdout.write(f"{directory}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
