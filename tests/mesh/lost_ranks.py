"""kill -9 of a follower of a worker on several devices."""

import asyncio
import os
import signal

from components.wire.instances import InstanceRecord
from tests.mesh.harness import Worker
from tests.waiting import is_alive, until


async def ends_with_a_follower(worker: Worker, record: InstanceRecord) -> None:
    """Kill the last follower: the whole instance must end, and log the cause."""
    assert record.kv is not None
    followers = [rank.pid for rank in record.kv.followers]
    os.kill(followers[-1], signal.SIGKILL)
    assert await asyncio.to_thread(worker.exit_code) != 0
    assert f"rank {len(followers)}, process {followers[-1]}: it ended with -9" in worker.logged()
    await until(lambda: not any(map(is_alive, followers)), "the end of all ranks")
