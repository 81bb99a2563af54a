"""A fake service: it logs JSON lines, reports "ready" and ends on SIGTERM, or misbehaves on request.

`fake_service.py [--http PORT] [habit …]`. Habits:

- at the start: `is-misconfigured`, `is-misconfigured-by=FILE` while there is a FILE, `dies-early` before "ready",
  `progresses` before it, `shouts` 4 MB, `registers` with an instance id
- after it: `dies` at once, `hangs` on SIGTERM, `drains` for 0.3 s on SIGTERM
- what it leaves behind: `breeds` a child that outlives it, `leaves-shm` a file in /dev/shm, `leaves-folder` a temporary folder
"""

import http.server
import json
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path


def log(event: str, **facts: str | int) -> None:
    line = {"ts": "2026-01-02T03:04:05", "level": "info", "logger": "fake", "event": event, **facts}
    # not through a buffer: a signal handler may log during another log line
    os.write(2, json.dumps(line).encode() + b"\n")


class Models(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"status": "ok", "models": ["fake-model"]}')

    def log_message(self, *_: object) -> None:
        pass


def drain(*_: object) -> None:
    signal.signal(signal.SIGTERM, lambda *_: log("a second signal"))
    log("draining")
    time.sleep(0.3)
    log("drained")
    sys.exit(0)


def main(argv: list[str]) -> None:
    habits = set(argv)
    log("starting", pid=os.getpid(), workers=os.environ.get("FAKE_WORKERS", ""))
    if "progresses" in habits:
        for done in range(11):
            log("progress", task="loading", done=done, total=10)
    if "shouts" in habits:
        for _ in range(4000):
            log("shouting", what="x" * 1000)
    if "leaves-folder" in habits:
        log("made", folder=tempfile.mkdtemp(prefix=f"kvmesh-test-{os.getpid()}-"))
    flaws = [Path(habit.partition("=")[2]) for habit in habits if habit.startswith("is-misconfigured-by=")]
    if "is-misconfigured" in habits or any(flaw.exists() for flaw in flaws):
        sys.stderr.write("setting flavour: no such thing\n")
        sys.exit(78)
    if "dies-early" in habits:
        sys.exit("Traceback of fake: no such thing")
    if "breeds" in habits:
        grandchild = subprocess.Popen(["/bin/sleep", "300"])
        log("bred", grandchild=grandchild.pid)
    if "leaves-shm" in habits:
        file = Path(f"/dev/shm/kvmesh-test-{os.getpid()}")
        file.write_bytes(b"x" * 4096)
        with file.open("r+b") as stream:
            held = mmap.mmap(stream.fileno(), 4096)
        log("mapped", file=str(file), size=len(held))
    page = {}
    if "--http" in habits:
        port = int(argv[argv.index("--http") + 1])
        page = {"metrics": f"http://127.0.0.1:{port}"}
        server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Models)
        threading.Thread(target=server.serve_forever, daemon=True).start()
    signal.signal(signal.SIGTERM, signal.SIG_IGN if "hangs" in habits else lambda *_: sys.exit(0))
    if "drains" in habits:
        signal.signal(signal.SIGTERM, drain)
    log("ready", **page, **({"instance": f"id{os.getpid()}"} if "registers" in habits else {}))
    if "dies" in habits:
        sys.exit(3)
    while True:
        time.sleep(60)


if __name__ == "__main__":
    main(sys.argv[1:])
