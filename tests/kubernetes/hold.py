"""Keep a cluster between runs of the tests: `python -m tests.kubernetes.hold FOLDER`; Ctrl-C or SIGTERM ends it.

FOLDER is a new one. The tests use it with KUBERNETES_TEST_CLUSTER=FOLDER.
"""

import contextlib
import signal
import sys
from pathlib import Path

from tests.kubernetes.cluster import require_all, running_cluster
from tests.kubernetes.servers import start_servers


def main(folder: Path) -> None:
    require_all()
    folder.mkdir(parents=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with running_cluster(folder) as cluster:
        start_servers(cluster)
        (folder / "init").write_text(str(cluster.init))
        print(f"KUBERNETES_TEST_CLUSTER={folder}", flush=True)  # noqa: T201
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
