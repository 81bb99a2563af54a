"""A frontend that logs all equal lines: tests count the streams that move."""

import runpy

from components.telemetry import repeated_lines

repeated_lines.BURST = 1_000_000  # type: ignore[misc]

if __name__ == "__main__":
    runpy.run_module("services.frontend", run_name="__main__", alter_sys=True)
