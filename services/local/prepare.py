"""`python -m services.local.prepare MODEL STATE_DIR`: download or convert a model, with progress as log lines."""

import logging
import sys
from pathlib import Path

from components.startup import refuse
from components.telemetry.logs import configure_logs, log_progress
from engine.errors import ModelUnavailable
from engine.model.resolve import model_dir

log = logging.getLogger(__name__)


def main(model: str, state_dir: Path) -> None:
    configure_logs("info", "json")
    try:
        directory = model_dir(model, state_dir, log_progress)
    except ModelUnavailable as exc:
        refuse(exc.message)
    log.info("ready", extra={"directory": str(directory)})


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
