"""Each alert fires with its fault, and not in a healthy mesh, and it names existing metrics."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.mesh.metrics_table import documented

REPO: Final = Path(__file__).resolve().parents[2]
RULES: Final = REPO / "deploy" / "compose" / "prometheus" / "rules.yml"
CONFIG: Final = RULES.with_name("prometheus.yml")
DASHBOARD: Final = REPO / "deploy" / "compose" / "grafana" / "dashboards" / "kvmesh.json"
RUNBOOK: Final = REPO / "docs" / "alerts.md"
OURS: Final = re.compile(r"\bkvmesh_\w+")
BUCKETS: Final = ("0.1", "0.25", "1", "+Inf")
FIRES_AT: Final = "20m"

Series = dict[str, str]

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs promtool: apt-get install prometheus"
)


def of(job: str, name: str, **labels: str) -> str:
    shown = {"job": f"kvmesh-{job}", "instance": f"{job}-1", "namespace": "mesh", **labels}
    inside = ",".join(f'{label}="{value}"' for label, value in shown.items())
    return f"{name}{{{inside}}}"


def local(reason: str) -> str:
    return of("decode", "kvmesh_prompts_computed_on_decode_total", reason=reason)


def transfers(outcome: str, job: str = "decode") -> str:
    return of(job, "kvmesh_kv_transfers_total", outcome=outcome, cause="")


def lag(*counts: str) -> Series:
    """Return observations of each bucket."""
    names = [of("decode", "kvmesh_event_loop_lag_seconds_bucket", le=le) for le in BUCKETS]
    return dict(zip(names, counts, strict=True))


HEALTHY: Final[Series] = {
    local("few_tokens"): "0+3x100",
    local("queues"): "0+1x100",
    local("transfer_failed"): "0+0x100",
    transfers("completed"): "0+60x100",
    transfers("failed"): "0+1x100",
    transfers("failed", "prefill"): "0+50x100",  # only decode counts, so that none counts twice
    of("decode", "kvmesh_instances", role="prefill", state="usable"): "2x100",
    of("decode", "kvmesh_prefill_instances_incompatible"): "0x100",
    of("decode", "kvmesh_instances_lost_total", role="prefill", reason="silent"): "0 0 1x100",
    of("decode", "kvmesh_instances_lost_total", role="prefill", reason="drained"): "0+5x100",
    of("frontend", "kvmesh_instances", role="decode", state="usable"): "1x100",
    of("frontend", "kvmesh_instances", role="decode", state="stalled"): "0x100",
    of("frontend", "kvmesh_requests_refused_total", reason="full"): "0+1x100",
    of("frontend", "kvmesh_requests_total", status="200"): "0+100x100",
    of("frontend", "kvmesh_queue_oldest_seconds", queue="admission"): "2x100",
    of("decode", "kvmesh_queue_oldest_seconds", queue="running"): "500x100",
    of("decode", "kvmesh_kv_cache_usage_perc"): "0.9x100",
    of("decode", "kvmesh_etcd_contact_age_seconds"): "3x100",
    of("decode", "kvmesh_nats_contact_age_seconds"): "0.4x100",
    of("frontend", "kvmesh_frames_lost_total"): "0x100",
    of("frontend", "kvmesh_frame_requests_total", why="gap"): "0 1x100",
    of("frontend", "kvmesh_frame_requests_total", why="check"): "0+60x100",
    of("decode", "kvmesh_clock_skew_seconds"): "0.02x100",
    of("decode", "kvmesh_spans_dropped_total", cause="receiver_away"): "0 500x100",
    of("decode", "up"): "1x100",
    **lag("0+240x100", "0+240x100", "0+240x100", "0+240x100"),
}
NO_TRANSFERS: Final[Series] = {transfers("completed"): "100x100", transfers("failed"): "5x100"}
# The differences of a mesh with the fault.
FAULTS: Final[dict[str, Series]] = {
    "KvmeshDecodeOnly": {**NO_TRANSFERS, local("unusable"): "0+60x100"},
    "KvmeshPrefillIncompatible": {of("decode", "kvmesh_prefill_instances_incompatible"): "1x100"},
    "KvmeshTransfersFailing": {transfers("failed"): "0+10x100"},
    "KvmeshInstanceFlapping": {
        of("decode", "kvmesh_instances_lost_total", role="prefill", reason="silent"): "0+0.5x100"
    },
    "KvmeshNoCapacity": {of("frontend", "kvmesh_instances", role="decode", state="usable"): "0x100"},
    "KvmeshRequestsRefused": {of("frontend", "kvmesh_requests_refused_total", reason="full"): "0+20x100"},
    "KvmeshQueueAge": {of("frontend", "kvmesh_queue_oldest_seconds", queue="admission"): "45x100"},
    "KvmeshKvPoolFull": {of("decode", "kvmesh_kv_cache_usage_perc"): "0.99x100"},
    "KvmeshEtcdUnreachable": {of("decode", "kvmesh_etcd_contact_age_seconds"): "0+60x100"},
    "KvmeshNatsUnreachable": {of("decode", "kvmesh_nats_contact_age_seconds"): "0+60x100"},
    "KvmeshFramesLost": {of("frontend", "kvmesh_frame_requests_total", why="gap"): "0+2x100"},
    "KvmeshClockSkew": {of("decode", "kvmesh_clock_skew_seconds"): "3x100"},
    "KvmeshEventLoopLag": lag("0+100x100", "0+150x100", "0+240x100", "0+240x100"),
    "KvmeshSpansDropped": {of("decode", "kvmesh_spans_dropped_total", cause="receiver_away"): "0+500x100"},
    "KvmeshPageUnreadable": {of("decode", "up"): "0x100"},
}
# These look like a fault, but nothing may fire.
HARMLESS: Final[dict[str, Series]] = {
    "a mesh without prefill": {
        **NO_TRANSFERS,
        local("no_prefill"): "0+60x100",
        of("decode", "kvmesh_instances", role="prefill", state="usable"): "0x100",
    },
    "an idle mesh": {**NO_TRANSFERS, local("few_tokens"): "50x100", local("queues"): "5x100"},
    "only short prompts": {**NO_TRANSFERS, local("few_tokens"): "0+60x100"},
}


def rules() -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]}


def series(changes: Series) -> list[dict[str, str]]:
    return [{"series": name, "values": values} for name, values in {**HEALTHY, **changes}.items()]


def case(name: str, changes: Series, fires: str = "") -> dict[str, Any]:
    """Make a case in which at the end only `fires` fires."""
    quiet = [{"eval_time": FIRES_AT, "alertname": alert, "exp_alerts": []} for alert in rules() if alert != fires]
    firing = f'count(ALERTS{{alertstate="firing",alertname="{fires}"}}) > bool 0'
    expected = [{"expr": firing, "eval_time": FIRES_AT, "exp_samples": [{"labels": "{}", "value": 1}]}] if fires else []
    return {
        "name": name,
        "interval": "1m",
        "input_series": series(changes),
        "alert_rule_test": quiet,
        "promql_expr_test": expected,
    }


def test_every_alert_has_a_fault_that_lets_it_fire_and_a_page_that_says_what_to_do() -> None:
    assert set(FAULTS) == set(rules())
    headings = re.findall(r"^## (Kvmesh\w+)$", RUNBOOK.read_text(), re.MULTILINE)
    assert headings == list(rules())
    for name, rule in rules().items():
        assert rule["annotations"]["runbook"] == f"docs/alerts.md#{name.lower()}"


def test_alerts_dashboard_and_runbook_name_only_metrics_that_exist() -> None:
    queries = [
        target["expr"] for panel in json.loads(DASHBOARD.read_text())["panels"] for target in panel.get("targets", [])
    ]
    assert len(queries) > 30
    written = {
        "rules": [rule["expr"] for rule in rules().values()],
        "dashboard": queries,
        "runbook": [RUNBOOK.read_text()],
    }
    known = documented()
    without_parts = {re.sub(r"_(bucket|sum|count)$", "", name) for name in known}
    for where, texts in written.items():
        used = {name for text in texts for name in OURS.findall(text)}
        assert used - known - (without_parts if where == "runbook" else set()) == set(), where


def test_every_query_of_the_dashboard_is_of_the_chosen_mesh() -> None:
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", []):
            assert target["expr"].count('namespace="$namespace"') == len(OURS.findall(target["expr"])), target["expr"]


@needs_promtool
def test_rules_and_configuration_are_valid() -> None:
    done = subprocess.run(["promtool", "check", "config", CONFIG], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_each_fault_fires_its_alert_alone_and_a_healthy_mesh_none(tmp_path: Path) -> None:
    cases = [
        case("healthy", {}),
        *(case(name, changes) for name, changes in HARMLESS.items()),
        *(case(name, changes, name) for name, changes in FAULTS.items()),
    ]
    file = tmp_path / "cases.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": cases}))
    done = subprocess.run(["promtool", "test", "rules", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
