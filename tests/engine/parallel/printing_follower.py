"""A follower that prints other text than reports; it replaces `engine.parallel.rank_process`."""

import json
import os
import sys

import msgspec

from engine.parallel.orders import Report

TORN = "torn"  # as the model: it ends in the midst of a report

if __name__ == "__main__":
    model = json.loads(sys.stdin.readline())["model"]
    report = msgspec.json.encode(Report(os.getpid(), "cpu")).decode()
    sys.stdout.write("a library is loaded\n1\n")
    if model == TORN:
        sys.stdout.write(report[:-5])
        sys.stdout.flush()
        os._exit(3)
    sys.stdout.write(report + "\n")
    sys.stdout.flush()
    sys.stdin.read()
