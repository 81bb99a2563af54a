"""Credentials of single instances: one has no rights of others of its role, and a mesh of them works."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Final

import httpx
import pytest

from components.discovery.etcd import etcd_client
from components.discovery.etcd_users import admit
from components.permissions import User, nats_users
from services.local.accounts import Accounts, Backends
from services.local.servers import ETCD, NATS, Server, running
from tests.components.test_permissions import Peer, asked
from tests.mesh.harness import MeshProcesses
from tests.mesh.mocks import MOCK_ENV
from tests.mesh.preloaded import Preloaded
from tests.waiting import PATIENCE_S, until, wait_until

pytestmark = pytest.mark.mesh

NAMESPACE: Final = "mesh"
USERS: Final = {
    "d1": "decode/d1",
    "d2": "decode/d2",
    "p1": "prefill/p1",
    "b1": "bootstrap/b1",
    "f1": "frontend/f1",
    "root": "",
}
PASSWORDS: Final = {user: f"password-of-{user}" for user in USERS}
ENV: Final = {
    **MOCK_ENV,
    "MESH_DECODE_MAX_LOCAL_PREFILL": "0",
    "MESH_DECODE_LOCAL_PREFILL_ON_QUEUE": "false",
    "MESH_ENGINE__MOCK__ANSWER_TOKENS": "0",
}


class Servers:
    """etcd and NATS, whose users are the instances."""

    def __init__(self, etcd: Server, nats: Server) -> None:
        self._etcd, self._nats = etcd, nats

    def reach(self, user: str) -> Backends:
        etcd, nats = (one.url.rpartition("@")[2] for one in (self._etcd, self._nats))
        login = f"{user}:{PASSWORDS[user]}"
        return Backends(f"http://{login}@{etcd}", f"nats://{login}@{nats}", user)


def instances(home: Path, use: Callable[[Servers], None]) -> None:
    """Call `use` in a thread while the servers run."""
    accounts = Accounts(NAMESPACE, {}, PASSWORDS)

    async def main() -> None:
        async with running(ETCD, home, accounts=accounts) as etcd, running(NATS, home, accounts=accounts) as nats:
            users = {user: of for user, of in USERS.items() if of}
            with etcd_client(etcd.url) as client:
                admit(client, NAMESPACE, users, PASSWORDS)
            config = nats.home / "nats.conf"
            text = config.read_text()
            before, _, rest = text.partition("authorization {")
            rights = [
                User(user, of.split("/")[0], f'user: "{user}", password: "{PASSWORDS[user]}"', of.split("/")[1])
                for user, of in users.items()
            ]
            written = nats_users(NAMESPACE, rights, f'user: "root", password: "{PASSWORDS["root"]}"')
            config.write_text(before + written + rest.partition("\n}\n")[2])
            assert nats.process is not None
            nats.process.send_signal(1)  # SIGHUP
            await until(lambda: "Reloaded server configuration" in nats.log_file.read_text(), nats.log_file.read_text)
            await asyncio.to_thread(use, Servers(etcd, nats))

    asyncio.run(main())


def test_a_stolen_credential_of_one_instance_reads_and_writes_nothing_of_the_others(tmp_path: Path) -> None:
    async def scenario(servers: Servers) -> None:
        peers = {user: Peer() for user in USERS}
        for user, peer in peers.items():
            await peer.connect(servers.reach(user).nats_url, user)
        refused = {
            "d1": (
                ["mesh.decode.*.generate", "mesh.decode.d2.generate", "mesh.decode.>", "mesh.decode.d2.room_failed"],
                [
                    "mesh.decode.d2.heartbeat",
                    "mesh.decode.d2.kv_events",
                    "mesh.prefill.p1.pages",
                    "_INBOX.mesh.f1.abc.decode.d2.1",
                ],
            ),
            "p1": (["mesh.prefill.*.prefill", "mesh.prefill.p2.pages"], ["mesh.prefill.p2.heartbeat"]),
            "b1": (["mesh.bootstrap.*.open"], []),
            "f1": (["mesh.tokens.frontend.*", "mesh.frontend.*.cancel_response"], ["mesh.decode.d1.heartbeat"]),
        }
        allowed = {
            "d1": (
                ["mesh.decode.d1.generate", "mesh.prefill.*.heartbeat", "mesh.decode.ask_heartbeat"],
                [
                    "mesh.decode.d1.heartbeat",
                    "mesh.prefill.p1.prefill",
                    "mesh.bootstrap.b1.open",
                    "mesh.tokens.f1.f1",
                    "_INBOX.mesh.f1.abc.decode.d1.1",
                ],
            ),
            "p1": (["mesh.prefill.p1.prefill", "mesh.prefill.p1.pages"], ["mesh.decode.d2.kv_coming"]),
            "b1": (["mesh.bootstrap.b1.open"], ["mesh.prefill.p1.pages"]),
            "f1": (["mesh.tokens.f1.*"], ["mesh.decode.d2.generate"]),
        }
        for table, is_refused in ((refused, True), (allowed, False)):
            for user, (reads, sends) in table.items():
                for subject in reads:
                    await peers[user].client.subscribe(subject)
                for subject in sends:
                    await peers[user].client.publish(subject)
                wanted = [f"subscription {s.lower()}" for s in reads] + [f"publish {s.lower()}" for s in sends]
                assert set(await peers[user].refusals()) == (set(wanted) if is_refused else set()), user
        for peer in peers.values():
            await peer.client.close()

    def use(servers: Servers) -> None:
        asyncio.run(scenario(servers))
        keys = [f"{NAMESPACE}/instances/decode/{one}" for one in ("d1", "d10", "d2")]
        may = asked(servers.reach("d1").etcd_url, keys)
        assert may == {keys[0]: (True, True), keys[1]: (True, False), keys[2]: (True, False)}

    instances(tmp_path, use)


def test_a_mesh_in_which_each_instance_has_its_own_credential_serves_and_one_starts_again(
    preloaded: Preloaded, tmp_path: Path
) -> None:
    """The second decode d1 has the name of the first one, and another epoch."""

    def answers(url: str) -> int:
        """Return the number of tokens; 0 without instances."""
        body = {"model": "mock", "prompt": list(range(1, 200)), "max_tokens": 8, "ignore_eos": True}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S)
        return int(answer.json()["usage"]["completion_tokens"]) if answer.status_code == 200 else 0

    def use(servers: Servers) -> None:
        def start(role: str, user: str) -> str:
            variables = {**servers.reach(user).variables(), "MESH_INSTANCE_ID": user}
            worker = mesh.start_one(role, **variables)
            return worker.url if role == "frontend" else ""

        root = servers.reach("root")
        with MeshProcesses(root.etcd_url, root.nats_url, NAMESPACE, tmp_path, "mock", ENV, preloaded) as mesh:
            mesh.make_response_stream(root)
            start("bootstrap", "b1")
            start("prefill", "p1")
            start("decode", "d1")
            url = start("frontend", "f1")
            wait_until(lambda: answers(url) == 8)
            before = mesh.one("decode")
            before.kill()
            start("decode", "d1")
            wait_until(lambda: answers(url) == 8)
            start("decode", "d2")
            mesh.one("decode").terminate()
            wait_until(lambda: answers(url) == 8)
            said = [line for worker in mesh.workers for line in worker.logged().splitlines()]
            assert [line for line in said if "violation" in line.lower() or "permission denied" in line] == []
            assert [line for line in said if "local prefill" in line and "failed" in line] == []

    instances(tmp_path, use)
