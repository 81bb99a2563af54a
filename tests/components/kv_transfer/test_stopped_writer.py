"""A prefill that is stopped (SIGSTOP) in the middle of a write, between two real processes."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import msgspec
import pytest

from components.kv_transfer.nixl_transfer import open_nixl
from services.local.child_process import tethered
from tests.components.kv_transfer.nixl_peer import Pages
from tests.components.kv_transfer.stopped_writer import FULL, LIFE_S, STEP_PAGES, STEPS_BEFORE

pytestmark = pytest.mark.anyio

REPO: Final = Path(__file__).resolve().parents[3]


async def test_a_prefill_that_resumes_after_the_deadline_writes_into_no_page_of_the_next_request() -> None:
    pages = Pages()
    command = [*tethered(), sys.executable, "-m", "tests.components.kv_transfer.stopped_writer"]
    with subprocess.Popen(command, cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as prefill:
        assert prefill.stdin is not None
        assert prefill.stdout is not None
        try:
            async with open_nixl(pages, "decode-of-stopped") as transfer:
                landed = transfer.expect("room", transfer.aux.take())  # so that writes progress
                print(msgspec.json.encode(transfer.endpoint).decode(), file=prefill.stdin, flush=True)
                how = os.WSTOPPED | os.WEXITED | os.WNOWAIT
                await asyncio.to_thread(os.waitid, os.P_PID, prefill.pid, how)
                assert (pages.memory[: STEPS_BEFORE * STEP_PAGES] == FULL).all(), "it is in the middle of its write"
                assert not pages.memory[STEPS_BEFORE * STEP_PAGES :].any()
                await asyncio.sleep(LIFE_S)
                pages.set_all(0)
                prefill.send_signal(signal.SIGCONT)
                assert await asyncio.to_thread(prefill.stdout.readline) == f"DeadlineExceeded {STEPS_BEFORE}\n"
                assert not pages.memory.any()
                landed.cancel()
        finally:
            prefill.kill()
