"""Docker's engine, and images for all tests of the run."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.compose.docker_engine import DockerEngine, cannot_run, running_engine
from tests.compose.pip_settings import pip_secrets
from tests.compose.project import Build, build_images, project
from tests.compose.stand_ins import NoStandIn, images

KEPT: Final = (
    "KVMESH_COMPOSE_TEST_HOME"  # a directory for images that outlive the run; without it they are built each time
)


@pytest.fixture(scope="session")
def compose_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kept = os.environ.get(KEPT)
    return Path(kept).absolute() if kept else tmp_path_factory.mktemp("compose")


@pytest.fixture(scope="session")
def engine(compose_home: Path) -> Iterator[DockerEngine]:
    if why := cannot_run():
        pytest.fail(f"these tests cannot run here: {why}", pytrace=False)
    with running_engine(compose_home / "docker") as running:
        yield running


@pytest.fixture(scope="session")
def build(engine: DockerEngine, compose_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Build]:
    """Base images and settings, and all images of the project built with them."""
    try:
        names = images(engine, compose_home)
    except NoStandIn as exc:
        pytest.fail(f"these tests cannot run here: {exc}", pytrace=False)
    home = tmp_path_factory.mktemp("build")
    with pip_secrets(home) as secrets:
        made = Build(names, secrets)
        with project(engine, made, home, "kvmesh-test-build", ["docker-compose.yml"], {}, {}) as first:
            build_images(first)
        yield made
