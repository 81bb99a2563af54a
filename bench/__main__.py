"""python -m bench: lists the benchmarks and starts one by its name."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import typer

from components.program import become, program

HERE: Final = Path(__file__).parent
FORWARD_ALL: Final = {"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False}

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Measure a mesh or a part of it. Each benchmark can also be started as `python -m bench.NAME`.",
)


def benchmarks() -> Iterator[tuple[str, str]]:
    """Yield (name, first sentence of the docstring) of each module with a command line."""
    for path in sorted(HERE.rglob("*.py")):
        parts = path.relative_to(HERE).with_suffix("").parts
        source = path.read_text()
        if parts[-1:] != ("__main__",) and "typer.run(" not in source and "ArgumentParser(" not in source:
            continue
        name = ".".join(part for part in parts if part != "__main__")
        if name:
            yield name, first_sentence(ast.get_docstring(ast.parse(source)) or "")


def first_sentence(text: str) -> str:
    line = text.partition("\n")[0].partition(": python -m")[0]
    return line.partition(". ")[0].rstrip(".") + "."


def start(context: typer.Context) -> None:
    become(f"bench.{context.info_name}", context.args, f"kvmesh bench {context.info_name}")


for _name, _about in benchmarks():
    app.command(_name, short_help=_about, context_settings=dict(FORWARD_ALL), add_help_option=False)(start)

if __name__ == "__main__":
    app(prog_name=program("python -m bench"))
