"""python -m services.decode: requests in, KV from a prefill instance, tokens out."""

from functools import partial

from components.aio import first, raises
from components.discovery.registry import Registration, join_registry
from components.errors import Rejected
from components.kv_transfer.checksum import PageChecksums
from components.kv_transfer.choose import kv_opener, own_address
from components.messaging.bus import connect_bus
from components.messaging.fan_out import FleetSizes, Following
from components.messaging.fleet import watch_fleet
from components.messaging.heartbeats import send_heartbeats
from components.messaging.kv_publisher import publish_kv_events
from components.messaging.outbox import open_outbox
from components.messaging.presence import keep_present, present_endpoint
from components.messaging.profiles import keep_profiles
from components.messaging.service import serve_calls
from components.process import drain, new_instance_id, record_maker, run, settle, stop_signal, subject_of
from components.startup import refuse
from components.structured.masks import open_masks
from components.structured.metrics import ConstraintMetrics
from components.telemetry.logs import log_progress, log_ready
from components.telemetry.process_health import serve_health
from components.telemetry.spans import start_telemetry
from components.telemetry.worker_metrics import WorkerMetrics
from engine.model.resolve import model_dir, served_name
from engine.ports import KvRegion, max_request_pages
from engine.profiler import EngineProfiler
from engine.start import start_engine
from services.decode.config import DecodeSettings
from services.decode.handlers import DecodeService
from services.decode.remote_prefill import RemotePrefill
from services.decode.streams import ActiveRequests


def page_checksums(region: KvRegion) -> PageChecksums:
    """What verification needs; ends the process where it cannot work."""
    try:
        return PageChecksums(region)
    except Rejected as exc:
        refuse(f"setting verify_kv: {exc.message}")


async def main(settings: DecodeSettings) -> None:
    """Serve decode: reserve pages, receive KV for each bootstrap room, stream tokens, leave when all are answered."""
    me = new_instance_id()
    subject = subject_of(settings.namespace, "decode", me)
    model = settings.served_model_name or served_name(settings.model)
    if model in settings.engine.lora:
        refuse(f"setting engine.lora: {model!r} is the name of the model itself")
    open_transfer = kv_opener(settings.kv_transfer)  # before the engine: a wrong name shall not cost a model's start
    registration = Registration(me)
    metrics = WorkerMetrics()
    async with (
        start_telemetry(settings, "decode", me),
        connect_bus(settings.nats_url, f"decode-{me}") as bus,
        join_registry(settings.etcd_url, settings.namespace, settings.lease_ttl_s) as registry,
        start_engine(settings.model, settings.engine, settings.home, log_progress) as engine,
        open_masks(
            lambda: model_dir(settings.model, settings.home),
            engine.engine.vocab_size,
            engine.engine.eos_token_ids,
            ConstraintMetrics(metrics.registry),
        ) as masks,
        open_transfer(
            engine.engine.kv_region,
            f"decode-{me}",
            settings.kv_transfer_host or own_address(settings.etcd_url),
            max_request_pages(engine.engine),
        ) as transfer,
        keep_profiles(f"decode {me}", EngineProfiler(engine, {"role": "decode", "instance": me})) as profiles,
        publish_kv_events(
            bus,
            subject,
            me,
            lambda: registration.epoch,
            on=settings.engine.kv_events,
            rest_s=partial(FleetSizes(registry.book).kv_events_rest_s, "decode"),
        ) as kv_events,
        serve_health(settings, metrics.registry, bus, registry, registration) as page,
        keep_present(bus, registry.book),
        watch_fleet(
            bus,
            settings.namespace,
            "prefill",
            registry.book,
            settings.prefill_policy,
            kv_index_blocks=settings.kv_index_blocks,
            metrics=metrics.registry,
            following=Following(registry.book),
        ) as prefills,
        open_outbox(
            bus, me, lambda: registration.epoch, lambda: engine.stats.step, settings.frame_interval_ms / 1e3
        ) as outbox,
    ):
        checksums = page_checksums(engine.engine.kv_region) if settings.verify_kv else None
        remote = RemotePrefill(
            bus,
            registration,
            registry,
            transfer,
            settings.transfer_timeout_s,
            bootstrap_timeout_s=settings.bootstrap_timeout_s,
            checksums=checksums,
            recomputes=settings.on_transfer_failure == "recompute",
        )
        service = DecodeService(
            registration,
            engine,
            remote,
            prefills,
            ActiveRequests(outbox),
            metrics=metrics,
            model=model,
            max_local_prefill=settings.max_local_prefill,
            local_prefill_on_queue=settings.local_prefill_on_queue,
            on_transfer_failure=settings.on_transfer_failure,
            masks=masks,
        )
        record = record_maker(
            settings,
            "decode",
            me,
            model=model,
            adapters=engine.engine.adapters,
            max_context=engine.engine.max_context,
            kv=transfer.endpoint,
            http=page,
            kv_events=settings.engine.kv_events,
            embedding=engine.engine.embedding,
        )
        metrics.registry.register(bus.refusals)
        metrics.registry.register(bus.clocks)
        metrics.show_kv_events(lambda: kv_events.log.number, lambda: kv_events.log.dropped)
        engine.on_output(lambda output: kv_events.take(output.cache_events))
        endpoints = [
            *service.endpoints(),
            *profiles.endpoints(),
            *kv_events.endpoints(),
            present_endpoint(registration),
        ]
        async with (
            serve_calls(bus, "decode", subject, endpoints, {"instance_id": me, "model": model}),
            send_heartbeats(
                bus, subject, service.heartbeat, partial(FleetSizes(registry.book).heartbeat_rest_s, "decode")
            ) as heart,
            registry.advertise(registration, record),
        ):
            engine.on_output(lambda output: heart.stepped(output.stats.step))
            settle()
            log_ready(instance=me, model=model, metrics=page)
            await first(stop_signal(), raises(engine.failed()))
            await drain(service, settings.drain_timeout_s, heart.at_once)


if __name__ == "__main__":
    run(main(DecodeSettings.read()))
