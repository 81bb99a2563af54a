"""The receiving process of bench.transfer: `python -m bench.transfer_peer LAYOUT PAGES`.

It prints a JSON line for the sender, then answers each line `COUNT` with hashes of its first COUNT pages and of the
shared memory.
"""

import asyncio
import base64
import hashlib
import json
import sys
from multiprocessing.shared_memory import SharedMemory

import msgspec
import numpy as np

from components.kv_transfer.nixl_api import nixl_agent, nixl_agent_config
from components.kv_transfer.nixl_transfer import POLL_WRITES_S, NixlTransfer, open_nixl
from components.kv_transfer.ucx_settings import leave_out_rdma
from components.wire.layout import KvLayout, KvRegion


class Pool:
    def __init__(self, layout: KvLayout, num_pages: int) -> None:
        self.memory = np.empty((num_pages, layout.page_bytes), dtype=np.uint8)
        self.memory.fill(0)
        self.region = KvRegion(int(self.memory.ctypes.data), num_pages, layout, "cpu")


def plain_agent(name: str, pool: Pool) -> nixl_agent:
    leave_out_rdma()
    agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
    agent.register_memory([(pool.region.address, pool.memory.nbytes, 0, "")], mem_type="DRAM")
    return agent


def digest(memory: bytes | memoryview) -> str:
    return hashlib.blake2b(memory, digest_size=8).hexdigest()


async def main(layout: KvLayout, num_pages: int) -> None:
    pool = Pool(layout, num_pages)
    shared = SharedMemory(create=True, size=pool.memory.nbytes)
    try:
        assert shared.buf is not None, "open"
        async with open_nixl(pool.region, "receiver") as transfer:
            transfer.expect("never", 0)  # keeps its thread polling
            agent = plain_agent("plain-receiver", pool)
            progress = asyncio.create_task(keep_going(agent, transfer))
            facts = {
                "endpoint": msgspec.to_builtins(transfer.endpoint),
                "plain_metadata": base64.b64encode(agent.get_agent_metadata()).decode(),
                "shared": shared.name,
            }
            print(json.dumps(facts), flush=True)
            while line := await asyncio.to_thread(sys.stdin.readline):
                num_bytes = int(line) * layout.page_bytes
                landed = pool.memory.data.cast("B")[:num_bytes], shared.buf[:num_bytes]
                print(json.dumps([digest(memory) for memory in landed]), flush=True)
                del landed
            progress.cancel()
    finally:
        shared.close()
        shared.unlink()


async def keep_going(agent: nixl_agent, transfer: NixlTransfer) -> None:
    while True:
        agent.get_new_notifs()
        transfer.poll_often("never")  # as prefill's announcement does
        await asyncio.sleep(POLL_WRITES_S)  # as a worker polls at the end of a transfer


if __name__ == "__main__":
    asyncio.run(main(msgspec.json.decode(sys.argv[1], type=KvLayout), int(sys.argv[2])))
