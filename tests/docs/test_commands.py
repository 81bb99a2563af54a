"""Commands in README and docs: each program, target, module, option, setting, file and service exists.

Each of our command lines is parsed by its own parser, but not run; tests/mesh/test_http.py runs the requests.
"""

import contextlib
import io
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import pytest
import typer

from bench.__main__ import benchmarks
from components.settings import SHARED, WITH_SETTINGS, MeshSettings
from components.settings_help import HELP, settings_in
from components.version import VERSION
from services.command.__main__ import COMMANDS, app
from services.local.options import adapters, assigned, device_settings, settable
from tests.deploy.compose_files import load
from tests.docs.pages import PAGES, PLACEHOLDER, REPO, Command, commands

MAKEFILE: Final = (REPO / "Makefile").read_text()
COMPOSE_OPTIONS: Final = {
    *("--build", "--wait", "--detach", "--no-deps", "--no-recreate", "--profile", "--scale"),
    *("--follow", "--volumes"),
}
FOREIGN: Final = {  # options of other programs that the pages name
    *COMPOSE_OPTIONS,
    "--database",  # make audit
    "--graphs",  # make gpu-test
    "--one-by-one",  # deploy/compose/upgrade.sh
    "--inbox-prefix",  # nats
    "--prefix",  # etcdctl
    "--keys-only",  # the same
    *("--data-dir", "--initial-cluster", "--initial-advertise-peer-urls", "--name"),  # etcdutl
    "--from-file",  # kubectl
    "--reuse-values",  # Helm
    "--values",  # the same
    "--tokenizer",  # aiperf
    "--tasks",  # lm_eval
    "--model_args",
    "--use-server-token-count",  # the same
    *("--vllm-as-shipped", "--vllm-dtype", "--vllm-option", "--kvmesh-prefill"),  # bench.peers, made from a function
    "--speculative-config",  # vLLM
}
SECRETS: Final = {"MESH_FRONTEND_API_KEYS"}  # no option, so not in a help text
# errors of commands that a text names without their arguments
COMPLETE_ENOUGH: Final = ("MissingParameter", "NoArgsIsHelpError")
INLINE: Final = re.compile(r"`([^`\n]+)`")


class Wrong(Exception):
    pass


def must(holds: object, what: str) -> None:
    if not holds:
        raise Wrong(what)


def settings_of(role: str) -> type[MeshSettings]:
    found: type[MeshSettings] = getattr(import_module(f"services.{role}.config"), f"{role.title()}Settings")
    return found


@cache
def variables() -> frozenset[str]:
    named = {variable for _, variable, _ in settable()} | {f"MESH_{name.upper()}" for name in SHARED} | SECRETS
    for role in WITH_SETTINGS:
        cls = settings_of(role)
        prefix = str(cls.model_config["env_prefix"])
        named |= {f"{prefix}{setting.path.replace('.', '__').upper()}" for setting in settings_in(cls)}
    return frozenset(named)


def parser(module: str) -> Any | None:
    """Return the typer command of a module, or None."""
    if (REPO / module.replace(".", "/") / "__main__.py").exists():
        module = f"{module}.__main__"
    loaded = import_module(module)
    if hasattr(loaded, "app"):
        return typer.main.get_command(loaded.app)
    if not hasattr(loaded, "main") or "typer.run(main)" not in Path(str(loaded.__file__)).read_text():
        return None
    single = typer.Typer(add_completion=False)
    single.command()(loaded.main)
    return typer.main.get_command(single)


def parse(command: Any, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the parameters of the innermost command. Raises: Wrong."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            context = command.make_context("", list(arguments))
            while hasattr(context.command, "commands"):
                rest = [*getattr(context, "_protected_args", []), *context.args]
                name, inner, rest = context.command.resolve_command(context, rest)
                context = inner.make_context(name, rest, parent=context)
    except (typer.Exit, SystemExit):
        return {}  # --help, --version
    except Exception as exc:
        if type(exc).__name__ in COMPLETE_ENOUGH:
            return {}
        raise Wrong(f"{arguments}: {getattr(exc, 'message', exc)}") from exc
    parameters: dict[str, Any] = context.params
    return parameters


def check_module(module: str, arguments: Sequence[str]) -> None:
    must(find_spec(module) is not None, f"no module {module}")
    role = module.removeprefix("services.")
    if role in WITH_SETTINGS and role != module:
        if not set(arguments) & set(HELP):
            with contextlib.redirect_stderr(io.StringIO()) as said:
                try:
                    settings_of(role).read(list(arguments))
                except SystemExit:
                    raise Wrong(f"{module} {arguments}: {said.getvalue()}") from None
        return
    command = parser(module)
    if module == "bench" and arguments:
        check_module(f"bench.{arguments[0]}", arguments[1:])
    elif command is not None:
        parameters = parse(command, arguments)
        if module == "services.local":
            check_local(parameters)


def check_local(parameters: dict[str, Any]) -> None:
    try:
        assigned(parameters.get("set_") or [])
        device_settings(parameters.get("device") or [])
        adapters(parameters.get("lora") or [])
    except typer.BadParameter as exc:
        raise Wrong(exc.message) from exc


def check_make(arguments: Sequence[str]) -> None:
    targets = [word for word in arguments if "=" not in word]
    given = dict(word.split("=", 1) for word in arguments if "=" in word)
    must(targets, "make without a target")
    for target in targets:
        must(re.search(rf"^{re.escape(target)}:", MAKEFILE, re.MULTILINE), f"no target {target}")
    for name in given:
        must(f"$({name})" in MAKEFILE, f"make reads no variable {name}")
    if targets == ["up"]:
        check_module("services.local", shlex.split(given.get("ARGS", "")))


def check_python(arguments: Sequence[str]) -> None:
    if arguments == ["-", "<<EOF"]:  # a script, shown whole
        return
    must(arguments[:1] == ["-m"] and len(arguments) > 1, f"python {arguments}: only modules are run")
    if arguments[1] not in sys.stdlib_module_names:
        check_module(arguments[1], arguments[2:])


def check_kvmesh(arguments: Sequence[str]) -> None:
    if arguments and not arguments[0].startswith("-"):
        must(arguments[0] in COMMANDS, f"kvmesh has no command {arguments[0]}")
        check_module(COMMANDS[arguments[0]][0], arguments[1:])
    else:
        known = {name for parameter in typer.main.get_command(app).params for name in parameter.opts}
        must(set(arguments) <= known | {"--help"}, f"kvmesh has no option {arguments}")


def check_docker(arguments: Sequence[str]) -> None:
    """`docker compose [-f FILE …] [--profile NAME] up|exec SERVICE COMMAND`."""
    words = list(arguments)
    if words[:2] in (["volume", "rm"], ["buildx", "imagetools"]):  # docker's own
        return
    must(words.pop(0) == "compose", "docker without compose")
    composed: dict[str, Any] = {}
    if "-f" not in words:  # COMPOSE_FILE names it
        composed |= load(REPO / "deploy/compose/docker-compose.yml")["services"]
    while words[0].startswith("-"):
        option, value = words.pop(0), words.pop(0)
        if option == "-f":
            must((REPO / value).is_file(), f"no file {value}")
            composed |= load(REPO / value)["services"]
        elif option == "--profile":
            profiles = {name for service in composed.values() for name in service.get("profiles", [])}
            must(value in profiles, f"no profile {value}")
        else:
            raise Wrong(f"docker compose {option}")
    verb = words.pop(0)
    if verb == "exec":
        must(words.pop(0) in composed, "no such service")
        CHECKS[words[0]](words[1:])
    else:
        options = {word.partition("=")[0] for word in words if word.startswith("-")}
        must(options <= COMPOSE_OPTIONS, f"docker compose {verb} {words}")


def check_pip(arguments: Sequence[str]) -> None:
    """Installed packages must be our wheel, with or without an extra, or pinned in deploy/."""
    pins = (REPO / "deploy/model-requirements.txt").read_text()
    extras = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for word in (word for word in arguments if not word.startswith("-") and word != "install"):
        extra = re.fullmatch(r"(?:kvmesh|\.)\[(\w+)\]", word)
        ours = extra[1] in extras if extra else word.startswith(f"kvmesh-{VERSION}-")
        must(ours or word in pins, f"pip install {word}")


def nothing(_: Sequence[str]) -> None:
    """tests/mesh/test_http.py runs these."""


CHECKS: Final[dict[str, Callable[[Sequence[str]], None]]] = {
    "make": check_make,
    "python": check_python,
    "python3": check_python,
    "kvmesh": check_kvmesh,
    "docker": check_docker,
    "pip": check_pip,
    "curl": nothing,
    "ask": nothing,
}


def check(command: Command) -> None:
    """Raises: Wrong."""
    for name in command.variables:
        must(not name.startswith("MESH_") or name in variables(), f"no setting {name}")
    if command.program in CHECKS:
        CHECKS[command.program](command.words[1:])


def faults(text: str) -> Iterator[str]:
    for command in (*commands(text), *inline_commands(text)):
        try:
            check(command)
        except Wrong as exc:
            yield str(exc)


def inline_commands(text: str) -> Iterator[Command]:
    """Yield commands between backticks, also `bench.NAME`, but none with a placeholder. [Brackets] are removed."""
    names = {name for name, _ in benchmarks()}
    for code in INLINE.findall(text):
        first, _, rest = code.partition(" ")
        if first.startswith("bench.") and first.removeprefix("bench.") in names:
            line = f"python -m {code}"
        elif first in CHECKS and rest:
            line = code
        else:
            continue
        if not PLACEHOLDER.search(line):
            yield Command({}, shlex.split(re.sub(r"(?<= )\[(.*?)\]", r"\1", line)))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_a_page_could_run(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPO)
    assert list(faults(page.read_text())) == []


def test_the_pages_have_commands_of_each_kind() -> None:
    """Otherwise the parser of pages is broken."""
    found = [command.program for page in PAGES for command in commands(page.read_text())]
    assert {name for name in CHECKS if found.count(name)} == set(CHECKS)
    assert len([name for name in found if name in CHECKS]) > 40


@pytest.mark.parametrize(
    "wrong",
    [
        "make nothing",
        "make up NOTHING=1",
        "make up ARGS='--nothing 1'",
        "make up ARGS='--port 99999'",
        "make up ARGS='--set decode.nothing=1'",
        "make up ARGS='--device both=cuda'",
        "python -m services.nothing",
        "python -m services.inspect nothing",
        "python -m services.inspect trace last --nothing",
        "python -m services.planner --connector nothing",
        "python -m bench.serve --nothing 1",
        ".venv/bin/kvmesh nothing",
        "kvmesh --nothing",
        "kvmesh bench simulate --nothing",
        "kvmesh frontend --port many",
        "MESH_FRONTEND_NOTHING=1 make up",
        "docker compose -f deploy/compose/nothing.yml up",
        "docker compose -f deploy/compose/docker-compose.yml --profile nothing up",
        "docker compose -f deploy/compose/docker-compose.yml exec nothing python -m services.inspect",
        "kvmesh-env/bin/pip install kvmesh-0.0.1-py3-none-any.whl",
    ],
)
def test_a_command_that_could_not_run_is_found(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPO)
    assert len(list(faults(f"Text.\n\n    {wrong}\n\nText, `{wrong}`.\n"))) in {1, 2}


def options_of(command: Any) -> Iterator[str]:
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)
    for inner in getattr(command, "commands", {}).values():
        yield from options_of(inner)


@cache
def options() -> frozenset[str]:
    modules = ["services.local", "services.inspect", "services.command", *(f"bench.{name}" for name, _ in benchmarks())]
    known = {option for module in modules if (command := parser(module)) for option in options_of(command)}
    for role in WITH_SETTINGS:
        known |= {f"--{setting.path.replace('_', '-')}" for setting in settings_in(settings_of(role))}
    return frozenset({*known, *HELP, *FOREIGN})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_option_and_variable_of_a_page_exists(page: Path) -> None:
    text = page.read_text()
    if page.name.startswith("from-"):  # the first column has a peer's
        text = "\n".join(row.split("|", 2)[2] for row in text.splitlines() if row.startswith("| `"))
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+(?:\.[a-z-]+)*", text))
    assert sorted(named - options()) == []
    assert sorted(set(re.findall(r"\bMESH_\w*[A-Z]\b", page.read_text())) - variables()) == []
