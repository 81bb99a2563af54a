"""This machine's settings of pip, for a build: a pip.conf without paths of this machine."""

import configparser
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from tests.waiting import PATIENCE_S

HERE: Final = "127.0.0.1"
LISTS: Final = ("find-links", "extra-index-url", "index-url")
FILES: Final = {"cert": "pip_ca", "constraint": "pip_constraints"}  # the secret that holds each


@contextmanager
def pip_secrets(home: Path) -> Iterator[dict[str, Path]]:
    """Yield a file for each secret of the Dockerfile. Packages on disk are served over HTTP meanwhile."""
    secrets: dict[str, Path] = {}
    written = configparser.RawConfigParser()
    written["global"] = {}
    with ExitStack() as servers:
        for name, value in _settings().items():
            if name in FILES:
                secrets[FILES[name]] = Path(value)
                written["global"][name] = f"/run/secrets/{FILES[name]}"
            elif name in LISTS:
                written["global"][name] = " ".join(_reachable(place, servers) for place in value.split())
            else:
                written["global"][name] = value
        secrets["pip_conf"] = home / "pip.conf"
        with secrets["pip_conf"].open("w") as file:
            written.write(file)
        yield secrets


def _settings() -> dict[str, str]:
    """Those of the environment have priority."""
    shown = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True, timeout=PATIENCE_S
    ).stdout
    found: dict[str, str] = {}
    lines = [line.partition("=") for line in shown.splitlines() if line.startswith(("global.", "install.", ":env:."))]
    for key, _, value in sorted(lines, key=lambda line: line[0].startswith(":env:")):
        found[key.rpartition(".")[2]] = value.strip("'")
    return found


def _reachable(place: str, servers: ExitStack) -> str:
    parts = urlsplit(place)
    if parts.scheme not in {"", "file"}:
        return place
    folder = Path(parts.path)
    served = folder.parent if folder.name == "simple" else folder  # an index links to files beside it
    handler = partial(_Quiet, directory=str(served))
    server = servers.enter_context(ThreadingHTTPServer((HERE, 0), handler))
    threading.Thread(target=server.serve_forever, name="packages", daemon=True).start()
    servers.callback(server.shutdown)
    return f"http://{HERE}:{server.server_address[1]}/{'simple/' if served != folder else ''}"


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name of the base class
        pass
