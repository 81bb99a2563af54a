"""make audit: pip-audit with lists of vulnerabilities from a test, and with an index without any."""

import json
import os
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any, Final

import pytest

from tests.conftest import REPO

JINJA: Final[dict[str, Any]] = {  # as in pypa/advisory-database, shortened
    "id": "PYSEC-2019-217",
    "modified": "2021-07-15T02:22:00Z",
    "aliases": ["CVE-2019-10906"],
    "details": "str.format_map allows a sandbox escape.",
    "affected": [
        {
            "package": {"name": "jinja2", "ecosystem": "PyPI"},
            "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "2.10.1"}]}],
            "versions": ["2.9", "2.10"],
        }
    ],
}
YAML: Final = """\
id: PYSEC-2099-1
modified: '2099-01-01T00:00:00Z'
published: 2099-01-01T00:00:00Z
details: made up
affected:
- package: {name: Some_Package, ecosystem: PyPI}
  ranges:
  - type: GIT
    events: [{introduced: abc}]
  - type: ECOSYSTEM
    events:
    - introduced: '1.10'
    - last_affected: 1.12rc1
    - introduced: 2.0.0
"""


def audit(*arguments: str, home: Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "deploy/audit.py", *arguments]
    return subprocess.run(
        command,
        cwd=REPO,
        env={**os.environ, "HOME": str(home), **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "all.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("PYSEC-2019-217.json", json.dumps(JINJA))
    return path


def wanting(tmp_path: Path, *lines: str) -> str:
    file = tmp_path / "wanted.txt"
    file.write_text("\n".join(lines))
    return f"--requirement={file}"


def test_a_known_vulnerability_is_named_with_its_repair_and_fails(tmp_path: Path, database: Path) -> None:
    wanted = wanting(tmp_path, "jinja2==2.10", "rich==14.0.0")
    ended = audit(f"--database={database}", wanted, home=tmp_path)
    assert ended.stdout.splitlines() == [
        f"{database}: 1 records, the latest of 2021-07-15",
        "jinja2 2.10: PYSEC-2019-217 CVE-2019-10906, fixed in 2.10.1",
        "1 known vulnerabilities in 2 packages",
    ]
    assert ended.returncode == 1, ended.stderr


def test_all_installed_packages_are_looked_up(tmp_path: Path, database: Path) -> None:
    """Also local versions, such as torch 2.13.0+cpu, which an index lacks."""
    ended = audit(f"--database={database}", home=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    number = int(ended.stdout.split()[-2])
    assert number > 80


@pytest.mark.parametrize(
    ("version", "affected"),
    [("1.9", 0), ("1.10", 1), ("1.12rc1", 1), ("1.12", 0), ("1.99", 0), ("2.0", 1), ("3.1", 1)],
)
def test_a_range_is_read_as_osv_defines_it(tmp_path: Path, version: str, affected: int) -> None:
    """In YAML, where a time is not a string, with a name not in canonical form."""
    (tmp_path / "vulns").mkdir()
    (tmp_path / "vulns" / "one.yaml").write_text(YAML)
    script = runpy.run_path(str(REPO / "deploy" / "audit.py"))
    database = script["read_database"](tmp_path / "vulns")
    assert len(script["vulnerabilities"](database, "some-package", version)) == affected


def test_packages_that_the_index_does_not_know_make_it_fail(tmp_path: Path) -> None:
    """An index without vulnerability data must not count as an audit."""
    wanted = wanting(tmp_path, "jinja2==2.10")
    ended = audit(wanted, home=tmp_path, HTTPS_PROXY="http://127.0.0.1:9", https_proxy="http://127.0.0.1:9")
    assert ended.returncode == 2, ended.stdout
    assert ended.stdout == ""
    assert ended.stderr.startswith("Nothing was audited: ")
    assert "--database PATH" in ended.stderr


@pytest.mark.parametrize("content", ["no zip", None])
def test_a_database_without_records_makes_it_fail(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "database"
    path.mkdir() if content is None else path.write_text(content)
    ended = audit(f"--database={path}", home=tmp_path)
    assert ended.returncode == 2
    assert str(path) in ended.stderr
