"""One process leads, and another one after it, with a real etcd."""

import asyncio
import json
from pathlib import Path

import pytest

from components.discovery.etcd import etcd_client
from components.discovery.etcd_stubs import etcdrpc
from components.discovery.leader import lead
from components.permissions import ADMINISTRATOR
from services.local.accounts import Accounts
from services.local.servers import ETCD, running
from tests.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.mesh, pytest.mark.anyio]


async def test_the_second_leads_when_the_first_has_left(etcd_url: str, namespace: str) -> None:
    key = f"{namespace}/planner"
    async with lead(etcd_url, key, {"who": "second"}, 1000.0) as second:
        async with lead(etcd_url, key, {"who": "first"}, 1000.0) as first:
            await until(lambda: first.is_held() or second.is_held())
            leads, waits = (first, second) if first.is_held() else (second, first)
            for _ in range(20):
                assert leads.is_held()
                assert not waits.is_held()
                await asyncio.sleep(0.05)
        assert not first.is_held()
        await until(second.is_held)
        with etcd_client(etcd_url) as client:
            assert json.loads(client.get(key)[0]) == {"who": "second"}
    with etcd_client(etcd_url) as client:
        assert client.get(key)[0] is None, "whoever leaves gives it up"


async def test_a_leader_without_its_lease_stops_leading_and_tries_again(
    etcd_url: str, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    key = f"{namespace}/planner"
    async with lead(etcd_url, key, {}, 3.0) as leadership:
        await until(leadership.is_held)
        with etcd_client(etcd_url) as client:
            lost = client.get(key)[1].lease_id
            client.revoke_lease(lost)
            await until(lambda: (now := client.get(key)[1]) is not None and now.lease_id != lost)
        await until(leadership.is_held)
    assert "no longer leading" in caplog.text


async def test_a_leader_whose_login_has_expired_gives_the_key_up(tmp_path: Path) -> None:
    """It revoked its lease with the token of the campaign's start, and the next planner waited for the lease to expire."""
    accounts = Accounts.make("mesh", 1, None)
    async with running(ETCD, tmp_path, accounts=accounts) as server:
        bare = server.url.rpartition("@")[2]

        def url(user: str) -> str:
            return f"http://{user}:{accounts.passwords[user]}@{bare}"

        def end_logins_of_planners() -> None:
            same = etcdrpc.AuthUserChangePasswordRequest(name="planner", password=accounts.passwords["planner"])
            with etcd_client(url(ADMINISTRATOR)) as client:
                etcdrpc.AuthStub(client.channel).UserChangePassword(same, PATIENCE_S)

        async with lead(url("planner"), "mesh/planner", {}, 60.0) as leadership:
            await until(leadership.is_held)
            await asyncio.to_thread(end_logins_of_planners)
        with etcd_client(url(ADMINISTRATOR)) as client:
            assert client.get("mesh/planner")[0] is None


async def test_without_etcd_no_process_leads() -> None:
    async with lead("http://127.0.0.1:1", "ns/planner", {}, 3.0) as leadership:
        await asyncio.sleep(0.3)
        assert not leadership.is_held()
