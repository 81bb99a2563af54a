"""An instance of two ranks that prints its follower and then sleeps. Its first input line is the path of its model."""

import json
import os
import sys
import time
from pathlib import Path

from engine.build import build_engine
from tests.engine.parallel.led import HOME
from tests.engine.tiny_engine import small

if __name__ == "__main__":
    engine = build_engine(sys.stdin.readline().strip(), small(tensor_parallel=2), HOME)
    followers = [(rank.pid, str(Path(rank.socket_path).parent)) for rank in engine.kv_region.followers]
    os.write(1, json.dumps(followers).encode() + b"\n")
    time.sleep(100)
