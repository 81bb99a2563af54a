"""A router's mirror of the prefix caches of real workers is exact, although some batches of events are lost."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from components.messaging.kv_subscriber import KvMirror, follow_kv_events
from components.permissions import ADMINISTRATOR
from components.routing.kv_index import KvIndex
from components.wire.instances import InstanceRecord, Role
from components.wire.kv_events import FetchKvDump, KvDumpPart, unpack_hashes
from components.wire.tokens import block_hashes, seed_hash
from tests.components.routing.test_kv_index import brute_force
from tests.mesh.harness import Client, MeshProcesses, open_client
from tests.mesh.mocks import MODEL, random_prompts
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.mesh

NUM_PAGES = 160  # so few that blocks are evicted
ROLES: tuple[Role, ...] = ("prefill", "decode")
MODULE = "tests.mesh.telling_worker"


class Mirrors:
    def __init__(self, client: Client) -> None:
        self.client = client
        self.index = {role: KvIndex() for role in ROLES}
        self.mirror: dict[str, KvMirror] = {}

    def workers(self) -> list[InstanceRecord]:
        return [record for role in ROLES for record in self.client.book.of_role(role)]

    async def cached(self, worker: InstanceRecord) -> set[bytes]:
        call = FetchKvDump(epoch=worker.epoch)
        answer = await self.client.bus.call(f"{worker.subject}.cached_blocks", call, KvDumpPart, timeout_s=PATIENCE_S)
        return set(unpack_hashes(answer.blocks))

    async def agree(self) -> dict[str, set[bytes]]:
        """Wait until each mirror equals its worker's cache; return the blocks by instance id."""
        held: dict[str, set[bytes]] = {}
        async with asyncio.timeout(PATIENCE_S):
            for worker in self.workers():
                name, role = worker.instance_id, worker.role
                while (
                    (cached := await self.cached(worker)) != self.index[role].blocks_of(name)
                    or not cached
                    or not self.mirror[role].is_current(name)
                ):
                    await asyncio.sleep(0.05)
                held[name] = cached
        return held

    async def finds(self, prompts: list[list[int]], salt: str) -> None:
        """A router must find the workers that have computed these prompts."""
        held = await self.agree()
        found = 0
        for worker in self.workers():
            assert worker.kv is not None
            layout = worker.kv.layout
            for prompt in prompts:
                chain = block_hashes(prompt, layout.page_size, seed_hash(layout.model, "", salt))
                depth = self.index[worker.role].find(chain).get(worker.instance_id, 0)
                assert depth == brute_force({"": held[worker.instance_id]}, chain).get("", 0)
                found += depth
        assert found > NUM_PAGES / 2


async def ask(client: Client, prompts: list[list[int]], salt: str) -> None:
    async with asyncio.TaskGroup() as tasks:
        for prompt in prompts:
            tasks.create_task(client.generate(prompt, 8, model=MODEL, salt=salt))
    await client.until_quiet()


def test_a_mirror_is_what_the_engines_hold_after_load_loss_and_restart(mock_mesh: MeshProcesses) -> None:
    env = {"MESH_ENGINE__NUM_PAGES": str(NUM_PAGES), "MESH_ENGINE__KV_EVENTS": "true"}
    env |= mock_mesh.as_user(ADMINISTRATOR).variables()  # no role may answer the calls that MODULE adds
    mock_mesh.modules |= dict.fromkeys(ROLES, MODULE)
    mock_mesh.start("bootstrap")
    first, _, _ = [mock_mesh._spawn(role, {**env, "ROLE": role}) for role in ("prefill", "prefill", "decode")]
    for started in mock_mesh.workers:
        started.wait_ready()
    prompts = random_prompts(40)

    async def scenario() -> None:
        async with open_client(mock_mesh, MODEL) as client, AsyncExitStack() as stack:
            mirrors = Mirrors(client)
            await client.until_usable("prefill", 2)
            await ask(client, prompts[:5], "before the router")
            for role in ROLES:
                mirrors.mirror[role] = await stack.enter_async_context(
                    follow_kv_events(client.bus, mock_mesh.namespace, role, client.book, mirrors.index[role])
                )
            await mirrors.agree()
            for turn in range(2):
                await ask(client, prompts, f"load {turn}")
            held = await mirrors.agree()
            assert sum(map(len, held.values())) > NUM_PAGES, "the caches are rather full"
            assert sum(m.counts.gaps for m in mirrors.mirror.values()) > 0, "batches were lost"

            before = {worker.instance_id for worker in client.book.of_role("prefill")}
            await asyncio.to_thread(first.kill)
            await until(lambda: len(client.book.of_role("prefill")) == 1)
            (gone,) = before - {worker.instance_id for worker in client.book.of_role("prefill")}
            assert mirrors.index["prefill"].blocks_of(gone) == set()
            await asyncio.to_thread(mock_mesh.start_one, "prefill", **env, ROLE="prefill")
            await client.until_usable("prefill", 2)
            await ask(client, prompts, "after the restart")
            await mirrors.finds(prompts, "after the restart")

    asyncio.run(scenario())
