"""make clients: coding agents, which call a tool, run it and send its result, against a running mesh."""

import os
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

from tests.clients.conftest import SERVED
from tests.clients.forcing_proxy import Forced, Forcing, forcing

pytestmark = [pytest.mark.clients, pytest.mark.mesh, pytest.mark.timeout(900)]  # the first run installs packages

WORD: Final = "xylophone"
SHOW: Final = "cat word.txt"
PROVIDER: Final = 'model_providers.kvmesh={{name="kvmesh",base_url="{url}/v1",wire_api="responses"}}'


def test_codex_runs_a_tool_and_sends_its_result(agent_mesh: str, agent_modules: Path, tmp_path: Path) -> None:
    with forcing(agent_mesh, Forced("exec_command", {"cmd": SHOW})) as proxy:
        options = ["-m", SERVED, "-c", 'model_provider="kvmesh"', "-c", PROVIDER.format(url=proxy.url)]
        options += ["-c", "analytics.enabled=false", "-c", "check_for_update_on_startup=false"]
        command = [agent_modules / ".bin" / "codex", "exec", "--skip-git-repo-check", "-s", "danger-full-access"]
        judge([*command, *options, "Show the word."], {}, proxy, tmp_path)


def test_claude_code_runs_a_tool_and_sends_its_result(agent_mesh: str, agent_modules: Path, tmp_path: Path) -> None:
    with forcing(agent_mesh, Forced("Bash", {"command": SHOW, "description": "Show"})) as proxy:
        env = {
            "ANTHROPIC_BASE_URL": proxy.url,
            "ANTHROPIC_AUTH_TOKEN": "none",
            "ANTHROPIC_MODEL": SERVED,
            "ANTHROPIC_SMALL_FAST_MODEL": SERVED,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "IS_SANDBOX": "1",  # else it refuses to skip permissions as root
        }
        command = [agent_modules / ".bin" / "claude", "--dangerously-skip-permissions", "-p", "Show the word."]
        judge(command, env, proxy, tmp_path)


def judge(command: list[Any], env: dict[str, str], proxy: Forcing, home: Path) -> None:
    """Run an agent, and check that each of its requests was answered and one had the tool's result."""
    (home / "word.txt").write_text(WORD)
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("MESH_", "OPENAI_", "ANTHROPIC_"))
    }
    done = subprocess.run(
        command,
        cwd=home,
        env={**inherited, "HOME": str(home), "CODEX_HOME": str(home), **env},
        stdin=subprocess.DEVNULL,
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert {exchange.status for exchange in proxy.exchanges} == {200}, done.stdout + done.stderr
    assert WORD not in proxy.exchanges[0].body
    assert WORD in proxy.exchanges[-1].body
