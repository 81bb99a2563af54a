"""`services.local` with fake services beside its real etcd and NATS: `fake_mesh.py <state dir> <port> [role=habit …]`.

`grown=habit` is for workers that are added later. `stop_timeout_s=0.5` is the time from SIGTERM to SIGKILL, by default
longer than any test waits.
"""

import asyncio
import os
import sys
from pathlib import Path

from services.local.accounts import Reach
from services.local.children import ChildSpec
from services.local.plan import TIERS, Plan
from services.local.supervisor import run_mesh

FAKE = str(Path(__file__).with_name("fake_service.py"))


class FakePlan(Plan):
    def model_command(self) -> list[str]:
        return [sys.executable, "-c", ""]

    def child(self, role: str, number: int, reach: Reach, metrics_port: int) -> ChildSpec:
        http = ["--http", str(self.frontend.port)] if role == "frontend" else []
        of = role if number == 0 else "grown"
        habits = [arg.partition("=")[2] for arg in sys.argv[3:] if arg.startswith(f"{of}=")]
        workers = str(self.counts["prefill"] + self.counts["decode"])
        env = {f"MESH_{role.upper()}_DRAIN_TIMEOUT_S": "0.4", "FAKE_WORKERS": workers}
        return ChildSpec(f"{role}-{number}", [sys.executable, FAKE, *http, *habits], env)


if __name__ == "__main__":
    os.environ.update({"MESH_STATE_DIR": sys.argv[1], "MESH_FRONTEND_PORT": sys.argv[2]})
    os.environ["MESH_OTLP_ENDPOINT"] = "http://127.0.0.1:9"  # so that no observer is started
    stop_timeout_s = next(
        (float(arg.partition("=")[2]) for arg in sys.argv[3:] if arg.startswith("stop_timeout_s=")), 1000.0
    )
    sys.exit(asyncio.run(run_mesh(FakePlan.read(dict.fromkeys(TIERS, 1), stop_timeout_s))))
