"""Records on three members of a NATS cluster: any one of them may be lost."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from components.messaging.connection import connect_bus
from components.messaging.records import Records, RecordsConfig
from tests.mesh.clusters import Member, NatsCluster

pytestmark = [pytest.mark.mesh, pytest.mark.anyio]

NAME: Final = "mesh.responses"
CONFIG: Final = RecordsConfig(records=10, bytes=1_000_000, age_s=600, replicas=3)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[NatsCluster]:
    with NatsCluster(tmp_path, jetstream=True) as cluster:
        yield cluster


async def leader(cluster: NatsCluster, records: Records) -> Member:
    name = (await records._jetstream.stream_info("mesh-responses")).cluster.leader
    return next(member for member in cluster.members if member.name == name)


async def test_records_are_read_and_stored_although_the_member_that_leads_them_is_lost(
    cluster: NatsCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """They were on one member, and unusable while it was down."""
    async with connect_bus(cluster.url, "one") as bus:
        records = Records(bus, NAME, CONFIG)
        await records.make()
        await records.put("a", b"before")
        (await leader(cluster, records)).kill()
        assert await records.put("b", b"after") is not None
        assert (await records.get("a"), await records.get("b")) == (b"before", b"after")
        assert "lost the stored responses" not in caplog.text


async def test_records_of_one_member_are_copied_to_the_others(cluster: NatsCluster) -> None:
    async with connect_bus(cluster.url, "one") as bus:
        await Records(bus, "mesh.other", CONFIG).make()  # once the members have elected a leader
        single = Records(bus, NAME, replace(CONFIG, replicas=1))
        await single.make()
        await single.put("a", b"before")
        records = Records(bus, NAME, CONFIG)
        await records.open()
        assert (await records._jetstream.stream_info("mesh-responses")).config.num_replicas == 3
