"""`inspect route` shows the instances that a request then gets, with real services."""

import asyncio
import re
from collections import Counter
from collections.abc import Callable

import httpx
import pytest
from rich.console import Console

from components.settings import MeshSettings
from components.wire.inspection import ExplainRoute
from services.inspect.route import show_route
from tests.mesh.harness import MeshProcesses
from tests.mesh.mocks import MODEL
from tests.mesh.trace_checks import traces_since
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.mesh

STORY = "There was a house by the sea, and in it lived a cat that knew the tides. " * 6


def _shown(mesh: MeshProcesses, text: str) -> str:
    console = Console(width=160, color_system=None)
    settings = mesh.as_user("inspect").applied(MeshSettings(namespace=mesh.namespace))
    with console.capture() as capture:
        asyncio.run(show_route(settings, console, ExplainRoute(text=text, chat=False)))
    return capture.get()


def _shown_with(mesh: MeshProcesses, text: str, fits: Callable[[str], bool]) -> str:
    """Wait until the output fits."""
    shown = ""

    def does_fit() -> bool:
        nonlocal shown
        shown = _shown(mesh, text)
        return fits(shown)

    wait_until(does_fit, lambda: shown)
    return shown


def _ask(url: str, text: str) -> int:
    """Send a prompt; return its cached tokens."""
    body = {"model": MODEL, "prompt": text, "max_tokens": 4, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S)
    answer.raise_for_status()
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_the_route_of_a_prompt_is_reported_with_its_reasons_and_nothing_is_sent(mock_mesh: MeshProcesses) -> None:
    *_, frontend = mock_mesh.start("bootstrap", "prefill", "prefill", "decode", "decode", "frontend")
    by = "a prefill instance, by kv_aware"
    shown = _shown_with(mock_mesh, STORY, lambda shown: by in shown and shown.count("closed") >= 4)
    assert f"a decode instance for {len(STORY)} tokens, by least_load" in shown
    assert f"0 of {len(STORY)} tokens cached" in shown
    assert _ask(frontend.url, STORY) == 0, "asking where it would go has sent nothing"

    pages = len(STORY) // 16 * 16
    longer = STORY + "One night the cat was gone, and so were the tides, and nobody knew why. " * 2
    cached = f"{pages} of {len(longer)} tokens cached"
    shown = _shown_with(mock_mesh, longer, lambda shown: shown.count(cached) >= 2)  # both have reported their pages
    rows = [re.split(r"\s*│\s*", line) for line in shown.splitlines() if line.startswith("│ →")]
    assert [row[3] for row in rows] == [str(pages)] * 2, "the one chosen has it, of both phases"
    assert _ask(frontend.url, longer) == pages


def test_policies_from_the_settings_are_those_that_choose(mock_mesh: MeshProcesses) -> None:
    """The default policies would choose the instances that have the prompt cached."""
    *_, frontend = mock_mesh.start(
        *("bootstrap", "prefill", "prefill", "decode", "decode", "frontend"),
        MESH_FRONTEND_DECODE_POLICY="round_robin",
        MESH_DECODE_PREFILL_POLICY="prefix_hash@load_factor=9,slack_tokens=99999",
    )
    shown = _shown_with(mock_mesh, STORY, lambda shown: shown.count("closed") >= 4)
    assert "tokens, by round_robin" in shown
    assert "a prefill instance, by prefix_hash@load_factor=9,slack_tokens=99999" in " ".join(shown.split())
    for turn in range(4):
        _ask(frontend.url, f"{STORY}{turn}")
    found = traces_since(mock_mesh.home, 0, 4, {"frontend.route", "decode.choose_prefill"})
    traces = [{span.name: span.attributes for span in spans} for spans in found]
    decodes = Counter(spans["frontend.route"]["kvmesh.decode.instance"] for spans in traces)
    assert sorted(decodes.values()) == [2, 2], "they take turns, despite cached prompts"
    assert len({spans["decode.choose_prefill"]["kvmesh.prefill.instance"] for spans in traces}) == 1
