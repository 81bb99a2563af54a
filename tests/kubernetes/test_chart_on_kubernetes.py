"""The chart on a Kubernetes: it becomes ready, answers, and loses no request while its pods change."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest

from tests.conftest import REPO
from tests.deploy.helm import CHART, EXAMPLES, tool
from tests.kubernetes.cluster import Cluster

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(600)]

PLANNED: Final = ("planner.enabled=true", 'planner.decode="3..3"')
INSPECT: Final = ("python", "-m", "services.inspect")
SERVING: Final = ("bootstrap", "prefill", "decode", "frontend")
ROLES: Final = (*SERVING, "observer")
SMALL: Final = {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": "2Gi"}}
VALUES: Final[dict[str, Any]] = {
    "image": {"pullPolicy": "Never"},
    "model": {"name": "mock"},
    "settings": {"MESH_ENGINE__MOCK__ANSWER_TOKENS": "0", "MESH_ENGINE__NUM_PAGES": "256", "OMP_NUM_THREADS": "1"},
    "frontend": {"resources": SMALL, "drainTimeoutSeconds": 20},
    "prefill": {"resources": SMALL, "drainTimeoutSeconds": 20, "sharedMemory": "64Mi"},
    "decode": {"resources": SMALL, "drainTimeoutSeconds": 20, "sharedMemory": "64Mi"},
    "bootstrap": {"resources": SMALL},
    "observer": {"resources": SMALL},
    "planner": {
        "resources": SMALL,
        "settings": {"MESH_PLANNER_EVERY_S": "1", "MESH_PLANNER_WINDOW_S": "4", "MESH_PLANNER_UP_AFTER_S": "1"},
    },
}


def install(cluster: Cluster, *settings: str) -> None:
    file = cluster.work / "values.json"
    file.write_text(json.dumps(VALUES))
    more = [part for setting in settings for part in ("--set-json", setting)]
    cluster.helm("upgrade", "--install", "mesh", str(CHART), "--values", str(file), *more)
    is_planned = "planner.enabled=true" in settings
    for role in (*ROLES, *(["planner"] if is_planned else [])):
        settled(cluster, role)


def settled(cluster: Cluster, role: str) -> None:
    """Wait until all pods of the newest form are ready, and no others are left."""
    cluster.kubectl("rollout", "status", f"deployment/mesh-kvmesh-{role}", "--timeout=170s", timeout_s=180)
    cluster.until(f"all pods of {role} are ready", lambda: all_ready(cluster, role), 120)


def all_ready(cluster: Cluster, role: str) -> bool:
    found = pods(cluster, role)
    ready = [one["status"]["containerStatuses"][0]["ready"] for one in found]
    return all(ready) and len(ready) == replicas(cluster, role) and not any(map(is_leaving, found))


def is_leaving(one: Any) -> bool:
    return "deletionTimestamp" in one["metadata"]


def pods(cluster: Cluster, role: str) -> list[Any]:
    found = cluster.get("pods", "--selector", f"app.kubernetes.io/instance=mesh,app.kubernetes.io/component={role}")
    return list(found["items"])


@pytest.fixture(scope="module")
def release(cluster: Cluster) -> Cluster:
    install(cluster)
    return cluster


def address(cluster: Cluster) -> str:
    return f"http://{cluster.get('service', 'mesh-kvmesh-frontend')['spec']['clusterIP']}:8000"


def fetched(cluster: Cluster, url: str) -> Any:
    return json.loads(cluster.run("curl", "--silent", "--fail", "--max-time", "10", url))


@contextmanager
def load(cluster: Cluster, streams: int = 3) -> Iterator[None]:
    """Streams in the background, none of which may fail."""
    command = cluster.inside(sys.executable, "-m", "tests.kubernetes.load", address(cluster), str(streams))
    with subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": str(REPO)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "begun\n"
            yield
            process.stdin.close()
            found = json.loads(process.stdout.readline())
        finally:
            process.kill()
    print(f"{found['complete']} streams complete, {len(found['failed'])} failed")  # noqa: T201
    assert found["failed"] == []
    assert found["complete"] > 10


def test_it_becomes_ready_without_a_restart(release: Cluster) -> None:
    for role in ROLES:
        for one in pods(release, role):
            (status,) = one["status"]["containerStatuses"]
            assert status["ready"], role
            assert status["restartCount"] == 0, role
    notes = release.helm("get", "notes", "mesh")
    assert "rollout status deployment/mesh-kvmesh-frontend" in notes


def test_it_answers_and_kv_moves_from_pod_to_pod(release: Cluster) -> None:
    assert [one["id"] for one in fetched(release, f"{address(release)}/v1/models")["data"]] == ["mock"]
    with load(release):
        release.until("enough streams", lambda: transfers(release) > 10)


def transfers(cluster: Cluster) -> float:
    """Return the number of completed transfers."""
    return total(cluster, "decode", "kvmesh_kv_transfers_total", 'outcome="completed"')


def total(cluster: Cluster, role: str, metric: str, label: str = "") -> float:
    """Return the sum over the metrics pages of the role's pods."""
    found = 0.0
    for one in pods(cluster, role):
        page = cluster.run("curl", "--silent", "--fail", f"http://{one['status']['podIP']}:9100/metrics")
        lines = [line for line in page.splitlines() if line.startswith(metric + "{")]
        found += sum(float(line.rpartition(" ")[2]) for line in lines if label in line)
    return found


def test_traces_reach_the_observer(release: Cluster) -> None:
    def kept() -> int:
        shown = release.kubectl("exec", "deploy/mesh-kvmesh-frontend", "--", *INSPECT, "traces", "--json")
        return len(json.loads(shown)["traces"])

    with load(release):
        release.until("traces are listed", kept)


def test_decode_is_scaled(release: Cluster) -> None:
    with load(release):
        for number in (3, 2):
            release.kubectl("scale", "deployment/mesh-kvmesh-decode", f"--replicas={number}")
            settled(release, "decode")
            release.until(f"frontends see {number}", lambda: seen(release, "decode") == number)  # noqa: B023


def seen(cluster: Cluster, role: str) -> int:
    return sum(one["role"] == role for one in fetched(cluster, f"{address(cluster)}/workers")["data"])


def test_a_pod_of_each_role_is_deleted_under_load_and_no_request_fails(release: Cluster) -> None:
    with load(release):
        for role in SERVING:
            release.kubectl("delete", "pod", pods(release, role)[0]["metadata"]["name"], "--wait=false")
        for role in SERVING:
            settled(release, role)


def test_a_decode_process_is_killed_under_load_and_its_streams_continue(release: Cluster) -> None:
    """By SIGKILL, as without memory. With a forced deletion the kubelet would send SIGTERM first."""
    name = pods(release, "decode")[0]["metadata"]["name"]

    def container() -> Any:
        (status,) = release.get("pod", name)["status"]["containerStatuses"]
        return status

    def moved() -> float:
        return total(release, "frontend", "kvmesh_streams_moved_total")

    killed = container()["containerID"].removeprefix("containerd://")
    with load(release, streams=6):
        before = moved()
        release.run("ctr", "--namespace=k8s.io", "tasks", "kill", "--signal=SIGKILL", killed)
        release.until("it runs again", lambda: container()["restartCount"] == 1 and container()["ready"])
        settled(release, "decode")
        assert moved() > before


def test_a_rolling_restart_of_all_under_load_fails_no_request(release: Cluster) -> None:
    before = {one["metadata"]["uid"] for role in ROLES for one in pods(release, role)}
    with load(release):
        for role in ROLES:
            release.kubectl("rollout", "restart", f"deployment/mesh-kvmesh-{role}")
        for role in ROLES:
            settled(release, role)
    assert not before & {one["metadata"]["uid"] for role in ROLES for one in pods(release, role)}


def test_the_planner_scales_with_its_own_rights_and_has_no_others(release: Cluster) -> None:
    install(release, *PLANNED)
    account = "--as=system:serviceaccount:default:mesh-kvmesh-planner"

    def may(verb: str, what: str, *more: str) -> bool:
        kubectl = release.inside(str(tool("kubectl")), f"--kubeconfig={release.work}/admin.json")
        asked = [*kubectl, "auth", "can-i", verb, what, *more, account]  # it exits with 1 for no
        return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() == "yes"

    for role in ("prefill", "decode"):
        for verb in ("get", "patch"):
            assert may(verb, f"deployments/mesh-kvmesh-{role}", "--subresource=scale")
        assert not may("update", f"deployments/mesh-kvmesh-{role}", "--subresource=scale")
        assert not may("patch", f"deployments/mesh-kvmesh-{role}")
    for what in ("deployments/mesh-kvmesh-frontend", "deployments/etcd"):
        assert not may("patch", what, "--subresource=scale")
    assert not any(may(verb, what) for verb in ("get", "list", "create", "delete") for what in ("pods", "secrets"))
    release.until("the planner has ordered three", lambda: replicas(release, "decode") == 3, 120)
    settled(release, "decode")
    release.until("frontends see 3", lambda: seen(release, "decode") == 3)


def replicas(cluster: Cluster, role: str) -> int:
    return int(cluster.get("deployment", f"mesh-kvmesh-{role}")["spec"]["replicas"])


def test_an_upgrade_keeps_the_planners_number_and_fails_no_request(release: Cluster) -> None:
    with load(release):
        install(release, *PLANNED, 'decode.podAnnotations={"changed":"yes"}')
    assert replicas(release, "decode") == 3


@pytest.mark.parametrize("values", ["secure", "gpu", "planner", "cluster"])
def test_the_api_server_accepts_every_form(release: Cluster, values: str) -> None:
    """It checks more than schemas: names of ports, volumes and mounts, selectors, quantities."""
    flags = ("--kube-version=1.20.2", "--values", str(EXAMPLES / f"{values}.yaml"))
    text = release.helm("template", "other", str(CHART), *flags)
    documents = [one for one in text.split("\n---\n") if "monitoring.coreos.com" not in one]  # the operator's kinds
    accepted = release.kubectl(
        "apply", "--dry-run=server", "--validate=false", "-f", "-", stdin="\n---\n".join(documents)
    )
    assert accepted.count("(server dry run)") == accepted.count("\n") > 15


def test_nothing_is_left_after_it_is_removed(release: Cluster) -> None:
    release.helm("uninstall", "mesh")
    kinds = "deployments,replicasets,pods,services,secrets,configmaps,serviceaccounts,roles,rolebindings"
    kinds += ",networkpolicies,poddisruptionbudgets,jobs,persistentvolumeclaims"
    mine = "--selector=app.kubernetes.io/instance=mesh"
    release.until("all is gone", lambda: release.get(kinds, mine)["items"] == [], 120)
