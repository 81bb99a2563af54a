"""python -m services.decode: receives requests, gets their KV from prefill instances and generates tokens."""

from collections.abc import Sequence

from components.errors import Rejected
from components.kv_transfer.checksum import PageChecksums
from components.kv_transfer.rank_connection import RankConnection
from components.messaging.fan_out import SubscriptionChoice
from components.messaging.fleet import open_fleet
from components.messaging.outbox import StreamOutbox
from components.process import run
from components.startup import refuse
from components.wire.layout import KvRegion
from services.decode.config import DecodeSettings
from services.decode.prefill_client import PrefillClient
from services.decode.requests import ActiveRequests
from services.decode.runner import RequestRunner
from services.decode.service import DecodeService
from services.worker import model_name, open_worker


def page_checksums(region: KvRegion, connections: Sequence[RankConnection] = ()) -> PageChecksums:
    """Exit if the pages cannot be read."""
    try:
        return PageChecksums(region, connections)
    except Rejected as exc:
        refuse(f"setting verify_kv: {exc.message}")


async def main(settings: DecodeSettings) -> None:
    """Serve until a stop signal, then finish the requests."""
    model = model_name(settings)
    if model in settings.engine.lora:
        refuse(f"setting engine.lora: {model!r} is the name of the model itself")
    async with (
        open_worker(settings, settings.engine, "decode") as worker,
        open_fleet(
            worker.bus,
            settings.namespace,
            "prefill",
            worker.registry.book,
            settings.prefill_policy,
            kv_index_blocks=settings.kv_index_blocks,
            metrics=worker.metrics.registry,
            following=SubscriptionChoice(worker.registry.book),
        ) as prefills,
        StreamOutbox(
            worker.bus,
            worker.instance_id,
            lambda: worker.registration.epoch,
            lambda: worker.engine.stats.step,
            settings.frame_interval_ms / 1e3,
        ).running() as outbox,
    ):
        engine = worker.engine.engine
        prefill = PrefillClient(
            worker.bus,
            worker.registration,
            worker.registry,
            worker.transfer,
            settings.transfer_timeout_s,
            bootstrap_timeout_s=settings.bootstrap_timeout_s,
            checksums=page_checksums(engine.kv_region, worker.writes.connections) if settings.verify_kv else None,
            recomputes=settings.on_transfer_failure == "recompute",
        )
        runner = RequestRunner(
            worker.engine,
            prefill,
            prefills,
            ActiveRequests(outbox),
            metrics=worker.metrics,
            model=model,
            max_local_prefill=settings.max_local_prefill,
            local_prefill_on_queue=settings.local_prefill_on_queue,
            on_transfer_failure=settings.on_transfer_failure,
            masks=worker.masks,
        )
        service = DecodeService(worker.registration, runner, model=model, metrics=worker.metrics)
        await worker.serve(
            service, settings.drain_timeout_s, max_context=engine.max_context, embedding=engine.embedding
        )


if __name__ == "__main__":
    run(main(DecodeSettings.read()))
