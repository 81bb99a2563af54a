"""A fake `docker compose`: records its arguments in a file, and its containers in another.

`fake_docker.py <directory> compose …`; answers like Compose 2: `ps --quiet` prints an id a line, `up` is silent on stdout.
"""

import json
import sys
import time
from pathlib import Path

home, words = Path(sys.argv[1]), sys.argv[2:]
with (home / "said.jsonl").open("a") as said:
    said.write(json.dumps(words) + "\n")
state = home / "containers.json"
containers = json.loads(state.read_text())
if "ps" in words:
    assert words[words.index("ps") :][:4] == ["ps", "--quiet", "--status", "running"]
    for i in range(containers[words[-1]]):
        sys.stdout.write(f"{i:012x}\n")
elif "up" in words:
    if (home / "broken").exists():
        sys.exit('service "prefill" has no container to start: no space left on device')
    role, _, count = words[words.index("--scale") + 1].partition("=")
    ends_s = time.monotonic() + (100 if int(count) < containers[role] else 0)
    while time.monotonic() < ends_s and not (home / "drained").exists():  # the grace period of a container
        time.sleep(0.01)
    containers[role] = int(count)
    state.write_text(json.dumps(containers))
