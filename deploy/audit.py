"""Checks the installed packages against a list of known vulnerabilities; run by `make audit`.

pip-audit queries PyPI for the vulnerabilities of each release. With `--database` it queries a server on loopback, which
reads a copy of the list. Exit codes: 0 no vulnerability, 1 some, 2 packages could not be looked up.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Final

import yaml
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

WITHOUT_RELEASES: Final = frozenset({"kvmesh"})  # not on PyPI
NEWEST: Final = 3
ADVICE: Final = (
    "PyPI's JSON API (https://pypi.org/pypi/NAME/VERSION/json) must be reachable, which private indexes seldom have. "
    "Otherwise set a copy of the list: ARGS='--database PATH', where PATH is https://osv-vulnerabilities.storage.googleapis.com/"
    "PyPI/all.zip or a checkout of https://github.com/pypa/advisory-database"
)

Record = dict[str, Any]  # a record in the OSV schema, https://ossf.github.io/osv-schema
Database = Mapping[str, list[Record]]  # by package


class NoData(Exception):
    pass


def installed() -> list[str]:
    """Return the requirements of all packages here, without local versions such as 2.13.0+cpu, which PyPI does not have."""
    found = {canonicalize_name(one.metadata["Name"]): Version(one.version).public for one in distributions()}
    return [f"{name}=={version}" for name, version in sorted(found.items()) if name not in WITHOUT_RELEASES]


def read_database(path: Path) -> Database:
    """Read the records of a zip file or a folder, in JSON or YAML. Raises: NoData."""
    found: dict[str, list[Record]] = defaultdict(list)
    for name, text in _files(path):
        try:
            record = json.loads(text) if name.endswith(".json") else _yaml(text)
        except (ValueError, yaml.YAMLError) as exc:
            raise NoData(f"{path}: {name} cannot be read: {exc}") from exc
        if isinstance(record, dict) and "id" in record:
            for package in {canonicalize_name(str(one["name"])) for one in _packages(record)}:
                found[package].append(record)
    if not found:
        raise NoData(f"{path} holds no records of PyPI's packages in the OSV format")
    return found


def _yaml(text: bytes) -> Any:
    return yaml.load(text, yaml.CBaseLoader)  # noqa: S506 - it makes text of everything, also of times


def _files(path: Path) -> Iterator[tuple[str, bytes]]:
    kinds = (".json", ".yaml")
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            if file.suffix in kinds and file.is_file():
                yield str(file.relative_to(path)), file.read_bytes()
        return
    try:
        with zipfile.ZipFile(path) as archive:
            for name in sorted(archive.namelist()):
                if name.endswith(kinds):
                    yield name, archive.read(name)
    except (OSError, zipfile.BadZipFile) as exc:
        raise NoData(f"{path} is neither a folder nor a zip file: {exc}") from exc


def _packages(record: Record) -> Iterator[Record]:
    for one in record.get("affected", ()):
        if one.get("package", {}).get("ecosystem") == "PyPI":
            yield one["package"]


def vulnerabilities(database: Database, name: str, version: str) -> list[Record]:
    """Return the records whose versions or ranges include this one."""
    name = canonicalize_name(name)
    return [
        record
        for record in database.get(name, ())
        if any(
            canonicalize_name(str(one["package"]["name"])) == name and _affects(one, Version(version))
            for one in record["affected"]
            if one.get("package", {}).get("ecosystem") == "PyPI"
        )
    ]


def _affects(affected: Record, version: Version) -> bool:
    if any(_version(listed) == version for listed in affected.get("versions", ())):
        return True
    ranges = (one["events"] for one in affected.get("ranges", ()) if one.get("type") == "ECOSYSTEM")
    return any(_within(events, version) for events in ranges)


def _within(events: Iterable[Mapping[str, str]], version: Version) -> bool:
    """Source: the evaluation in https://ossf.github.io/osv-schema/#evaluation."""
    inside = False
    ordered = [(_version(value), kind) for event in events for kind, value in event.items()]
    for at, kind in sorted(ordered, key=lambda one: one[0]):
        if kind == "introduced" and version >= at:
            inside = True
        elif (kind == "fixed" and version >= at) or (kind == "last_affected" and version > at):
            inside = False
    return inside


def _version(text: str) -> Version:
    try:
        return Version(str(text))
    except InvalidVersion:  # a version older than PEP 440
        return Version("0")


class _Answers(BaseHTTPRequestHandler):
    """The query of https://google.github.io/osv.dev/post-v1-query/."""

    def __init__(self, database: Database, *args: Any) -> None:
        self._database = database
        super().__init__(*args)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        found = vulnerabilities(self._database, asked["package"]["name"], asked["version"])
        body = json.dumps({"vulns": found} if found else {}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base's name
        pass


@contextmanager
def served(database: Database) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Answers, database)) as server:
        threading.Thread(target=server.serve_forever, name="osv", daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/v1/query"
        finally:
            server.shutdown()


def judged(requirements: Iterable[str], *service: str) -> list[Record]:
    """Return pip-audit's result for each package. Raises: NoData, if it has none for some of them."""
    with tempfile.TemporaryDirectory() as folder:
        file, output = Path(folder) / "requirements.txt", Path(folder) / "report.json"
        file.write_text("\n".join(requirements))
        options = ["--no-deps", "--disable-pip", "--progress-spinner=off", "--format=json", f"--output={output}"]
        command = [sys.executable, "-m", "pip_audit", *options, "--requirement", str(file), *service]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if not output.exists():
            lines = ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"]
            raise NoData(f"pip-audit failed: {lines[-1]}")
        packages: list[Record] = json.loads(output.read_text())["dependencies"]
    skipped = [package["name"] for package in packages if "skip_reason" in package]
    if skipped:
        some = ", ".join(skipped[:NEWEST])
        raise NoData(f"no vulnerability data for {len(skipped)} of {len(packages)} packages ({some}, …)")
    return packages


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make audit", description=__doc__)
    parser.add_argument("--database", type=Path, help="zip file or folder with records in the OSV format")
    parser.add_argument(
        "--requirement", type=Path, help="file with NAME==VERSION lines; default: the installed packages"
    )
    given = parser.parse_args(arguments)
    requirements = given.requirement.read_text().split() if given.requirement else installed()
    try:
        if given.database is None:
            packages = judged(requirements)
        else:
            database = read_database(given.database)
            records = {record["id"]: str(record.get("modified", "")) for known in database.values() for record in known}
            print(f"{given.database}: {len(records)} records, the latest of {max(records.values())[:10]}")  # noqa: T201
            with served(database) as url:
                packages = judged(requirements, "--vulnerability-service=osv", f"--osv-url={url}")
    except NoData as exc:
        print(f"Nothing was audited: {exc}.\n{ADVICE}.", file=sys.stderr)  # noqa: T201
        return 2
    found = [(package, one) for package in packages for one in package["vulns"]]
    for package, one in found:
        fixed = ", ".join(one["fix_versions"]) or "no release"
        names = " ".join([one["id"], *one["aliases"]])
        print(f"{package['name']} {package['version']}: {names}, fixed in {fixed}")  # noqa: T201
    print(f"{len(found)} known vulnerabilities in {len(packages)} packages")  # noqa: T201
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
