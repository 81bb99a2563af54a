import subprocess
import sys
from pathlib import Path

from bench.peers.vllm import spinning_threads

SPIN = """
import threading
def spin():
    while True: pass
threading.Thread(target=spin, daemon=True).start()
threading.Thread(target=threading.Event().wait, daemon=True).start()
print("ready", flush=True)
input()
"""


def test_of_an_idle_process_the_thread_that_spins_is_found_and_no_other() -> None:
    with subprocess.Popen([sys.executable, "-c", SPIN], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            threads = sorted(int(thread.name) for thread in Path(f"/proc/{process.pid}/task").iterdir())
            assert spinning_threads(process.pid) == [threads[1]]
        finally:
            process.kill()
