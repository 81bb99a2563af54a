"""docker-compose.yml with the real model: up, README's request, scaling, lost and drained workers, profiles."""

import json
import re
import threading
import time
from collections.abc import Iterator
from typing import Any, Final

import httpx
import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packaging.utils import canonicalize_name

from components.telemetry.stored_spans import Span
from components.version import VERSION
from tests.compose.docker_engine import DockerEngine, output
from tests.compose.project import UP_S, Build, Project, project, until_it_answers
from tests.conftest import REPO
from tests.mesh.trace_checks import orphans
from tests.waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.compose, pytest.mark.timeout(600)]

MODEL: Final = "smollm2-135m"
TOKENS: Final = 120
NUM_STREAMS: Final = 4
BEGUN: Final = 8  # events of a stream before the disturbance
DISAGGREGATED: Final = {
    "frontend.dispatch",
    "decode.request",
    "decode.call_prefill",
    "prefill.request",
    "prefill.compute",
    "prefill.transfer",
    "bootstrap.open",
    "decode.receive",
    "decode.generate",
    "frontend.stream",
}
EAGER: Final = {"MESH_ENGINE__COMPILE": "off"}  # its minute of two cores would be most of the test
ALWAYS_PREFILL: Final = {"MESH_DECODE_MAX_LOCAL_PREFILL": "0", "MESH_DECODE_LOCAL_PREFILL_ON_QUEUE": "false"}


@pytest.fixture(scope="module")
def stack(engine: DockerEngine, build: Build, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    home = tmp_path_factory.mktemp("one-host")
    settings = {"prefill": EAGER, "decode": EAGER | ALWAYS_PREFILL, "planner": {}}
    env = {"DOCKER_SOCKET": engine.socket.removeprefix("unix://")}
    files = ["docker-compose.yml"]
    with project(engine, build, home, "kvmesh-test-one", files, env, settings) as running:
        running.up("--build")
        yield running


def url_of(stack: Project) -> str:
    return stack.url("frontend", 8000)


def spans_of(stack: Project, request_id: str, expected: set[str]) -> list[Span]:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        spans = stack.traces().spans(request_id)
        if spans and not orphans(spans) and expected <= {span.name for span in spans}:
            return spans
        names = sorted({span.name for span in spans})
        assert time.monotonic() < deadline, f"{names}, without parent: {orphans(spans)}\n{stack.logs()}"
        time.sleep(0.3)


def body(number: int) -> dict[str, object]:
    return {
        "model": MODEL,
        "prompt": f"{number}. A long story about a river, a mill and the people who lived there: " * 3,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }


class Streams:
    """Streams in threads, and their results."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.texts = [""] * NUM_STREAMS
        self.events = [0] * NUM_STREAMS
        self.failed: list[str] = []
        self._threads = [threading.Thread(target=self._read, args=(i,), daemon=True) for i in range(NUM_STREAMS)]
        for thread in self._threads:
            thread.start()

    def until_begun(self) -> None:
        wait_until(lambda: min(self.events) >= BEGUN, lambda: self.failed)
        assert max(self.events) < TOKENS, "over before something could happen"

    def ended(self) -> list[str]:
        for thread in self._threads:
            thread.join(2 * PATIENCE_S)
        assert self.failed == []
        return self.texts

    def _read(self, number: int) -> None:
        request = body(number) | {"stream": True}
        try:
            with httpx.stream(
                "POST", f"{self._url}/v1/completions", json=request, timeout=PATIENCE_S, trust_env=False
            ) as answer:
                if answer.status_code != 200:
                    self.failed.append(f"{number}: {answer.read()!r}")
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        event: Any = json.loads(line.removeprefix("data: "))
                        if "error" in event:
                            self.failed.append(f"{number}: {event}")
                            return
                        self.texts[number] += "".join(choice["text"] for choice in event["choices"])
                        self.events[number] += 1
        except httpx.HTTPError as exc:
            self.failed.append(f"{number}: {exc!r}")


@pytest.fixture(scope="module")
def undisturbed(stack: Project) -> list[str]:
    """Return the texts of undisturbed streams."""
    return Streams(url_of(stack)).ended()


def test_the_readmes_request_is_answered(stack: Project) -> None:
    found = re.search(r"\$ (curl -s \S+/v1/chat/completions .*?\n.*?')\n", (REPO / "README.md").read_text())
    assert found is not None
    command = found[1].replace("http://127.0.0.1:8000", url_of(stack))
    assert url_of(stack) in command
    answer = json.loads(output(["bash", "-c", command], {}))
    assert "Paris" in answer["choices"][0]["message"]["content"]


def test_no_process_is_root_and_frontends_have_no_compiler(stack: Project) -> None:
    for service in ("frontend", "bootstrap", "prefill", "decode"):
        assert stack.compose("exec", "-T", service, "id", "-u").strip() == "1000"
        compiler = stack.compose("exec", "-T", service, "sh", "-c", "command -v g++ || true").strip()
        assert bool(compiler) == (service in {"prefill", "decode"})


def test_no_setting_of_this_machines_pip_stays_in_an_image(stack: Project, build: Build) -> None:
    """Secrets are mounted for one step; a copy could hold a company's hosts."""
    for image in ("kvmesh", "kvmesh-worker", "kvmesh-planner"):
        shown = stack.engine.docker(
            "run",
            "--rm",
            "--user",
            "root",
            "--entrypoint",
            "sh",
            "--network",
            "none",
            image,
            "-c",
            "ls -s /etc/pip.conf /run/secrets 2>/dev/null; find / -xdev -name 'pip*.conf' -size +0 2>/dev/null",
        )
        assert "pip_" not in shown, shown
        assert [
            line for line in shown.splitlines() if line.endswith(".conf") and not line.lstrip().startswith("0")
        ] == []
    assert build.secrets


@pytest.mark.parametrize("image", ["kvmesh", "kvmesh-worker", "kvmesh-planner"])
def test_an_image_lists_all_that_pip_installed_in_it(image: str, stack: Project) -> None:
    run = ("run", "--rm", "--network", "none", image)
    listed = stack.engine.docker(*run, "cat", "/opt/kvmesh/kvmesh.cdx.json")
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(listed) is None
    bom: Any = json.loads(listed)
    own = bom["metadata"]["component"]
    assert (own["name"], own["version"]) == ("kvmesh", VERSION)
    installed = {_distribution(line) for line in stack.engine.docker(*run, "pip", "list", "--format", "freeze").split()}
    pypi = [one for one in bom["components"] if not one["purl"].startswith("pkg:npm/")]
    assert {(canonicalize_name(one["name"]), one["version"]) for one in pypi} == installed
    assert len(pypi) < len(bom["components"]), "scripts of the page"
    names = {name for name, _ in installed}
    assert {"torch", "nats-py"} <= names
    assert "cyclonedx-bom" not in names, "what writes the list stays out of the image"


def _distribution(line: str) -> tuple[str, str]:
    name, _, version = line.partition("==")
    return canonicalize_name(name), version


def test_a_trace_goes_through_four_containers(stack: Project) -> None:
    named = {"x-request-id": "four"}
    answer = httpx.post(f"{url_of(stack)}/v1/completions", json=body(0), headers=named, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    spans = spans_of(stack, "four", DISAGGREGATED)
    assert len({span.service for span in spans}) == 4
    shown = stack.compose("exec", "-T", "frontend", "python", "-m", "services.inspect", "trace", "four")
    assert "prefill.transfer" in shown


def test_two_more_workers_take_requests(stack: Project, undisturbed: list[str]) -> None:
    stack.up("--no-recreate", "--scale", "prefill=2", "--scale", "decode=2")
    assert [len(stack.containers(role)) for role in ("prefill", "decode")] == [2, 2]
    assert Streams(url_of(stack)).ended() == undisturbed
    workers = stack.compose("exec", "-T", "frontend", "python", "-m", "services.inspect", "workers")
    assert workers.count("decode") >= 2


def test_streams_go_on_when_a_decode_container_is_killed(stack: Project, undisturbed: list[str]) -> None:
    streams = Streams(url_of(stack))
    streams.until_begun()
    stack.engine.docker("kill", stack.containers("decode")[0])
    assert streams.ended() == undisturbed
    stack.up("--no-recreate", "--scale", "prefill=2", "--scale", "decode=2")


def test_streams_go_on_when_a_decode_container_is_drained(stack: Project, undisturbed: list[str]) -> None:
    streams = Streams(url_of(stack))
    streams.until_begun()
    leaving = stack.containers("decode")[0]
    stack.engine.docker("stop", leaving)
    state: Any = stack.engine.inspected(leaving)["State"]
    assert state["ExitCode"] == 0, "it was killed, and had not drained"
    assert streams.ended() == undisturbed
    stack.up("--no-recreate", "--scale", "prefill=2", "--scale", "decode=2")


def test_prometheus_of_the_profile_scrapes_every_process(stack: Project) -> None:
    stack.compose("--profile", "metrics", "up", "--detach", "--wait", "--no-recreate", "--no-deps", "prometheus")
    url = stack.url("prometheus", 9090)
    until_it_answers(f"{url}/-/healthy")
    wanted = {"frontend": 1, "bootstrap": 1, "prefill": 2, "decode": 2}
    deadline = time.monotonic() + PATIENCE_S
    while True:
        shown = httpx.get(f"{url}/api/v1/targets", timeout=PATIENCE_S, trust_env=False).json()["data"]["activeTargets"]
        up = [target["labels"] for target in shown if target["health"] == "up"]
        counts = {role: sum(labels.get("job") == f"kvmesh-{role}" for labels in up) for role in wanted}
        if counts == wanted:
            break
        assert time.monotonic() < deadline, json.dumps(shown, indent=1)[-4000:]
        time.sleep(1)
    rules = httpx.get(f"{url}/api/v1/rules", timeout=PATIENCE_S, trust_env=False).json()["data"]["groups"]
    assert rules
    stack.engine.docker("rm", "--force", "--volumes", *stack.containers("prometheus"))


def test_the_planner_of_the_profile_removes_a_worker_that_it_may_not_have(stack: Project) -> None:
    """One prefill is allowed, but two run: it scales through the Docker socket, and one drains."""
    bounds = {"MESH_PLANNER_PREFILL": "1..1", "MESH_PLANNER_DECODE": "2..2"}
    planned = Project(stack.engine, stack.name, stack.files, {**stack.env, **bounds})
    planned.compose("--profile", "planner", "up", "--detach", "--wait", "--no-recreate", "--no-deps", "planner")
    deadline = time.monotonic() + UP_S
    while len(stack.containers("prefill")) != 1:
        assert time.monotonic() < deadline, planned.logs("planner")
        time.sleep(1)
    assert len(stack.containers("decode")) == 2
    stack.engine.docker("rm", "--force", *stack.containers("planner"))
