"""The dashboard of deploy/compose has the form that Grafana's own types describe. Grafana itself is not run.

tests/mesh/test_prometheus_server.py asks its queries of a real Prometheus.
"""

import subprocess
from pathlib import Path
from typing import Final

import pytest

from tests.clients.conftest import REPO

pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]  # the first run installs packages

DASHBOARD: Final = REPO / "deploy" / "compose" / "grafana" / "dashboards" / "kvmesh.json"
PROGRAM: Final = Path(__file__).with_name("scripts") / "dashboard.ts"
OPTIONS: Final = (
    *("--noEmit", "--strict", "--skipLibCheck", "--target", "es2022"),
    *("--module", "nodenext", "--moduleResolution", "nodenext"),
)


def faults(text: str, node_modules: Path) -> str:
    """What the compiler finds wrong in a dashboard."""
    program = node_modules.parent / "dashboard.ts"
    program.write_text(PROGRAM.read_text().replace("= DASHBOARD;", f"= {text};"))
    compiler = node_modules / "typescript" / "bin" / "tsc"
    done = subprocess.run(["node", compiler, *OPTIONS, program], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_the_dashboard_has_the_form_that_grafana_reads(node_modules: Path) -> None:
    assert faults(DASHBOARD.read_text(), node_modules) == ""


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ('"displayMode": "list"', '"displayMode": "rows"', '"rows"'),
        ('"showLegend": true', '"showLegends": true', "showLegends"),
        ('"type": "timeseries"', '"type": "graph"', "graph"),
        ('"expr": ', '"query": ', "query"),
        ('"schemaVersion": 39', '"schemaVersion": "39"', "number"),
    ],
)
def test_a_wrong_name_or_value_is_found(right: str, wrong: str, said: str, node_modules: Path) -> None:
    text = DASHBOARD.read_text()
    assert right in text
    assert said in faults(text.replace(right, wrong, 1), node_modules)
