"""python -m services.prefill: prompts in, KV pages into decode's memory."""

from functools import partial

from components.aio import first, raises
from components.discovery.registry import Registration, join_registry
from components.kv_transfer.choose import kv_opener, own_address
from components.messaging.bus import connect_bus
from components.messaging.fan_out import FleetSizes
from components.messaging.heartbeats import send_heartbeats
from components.messaging.kv_publisher import publish_kv_events
from components.messaging.presence import keep_present, present_endpoint
from components.messaging.profiles import keep_profiles
from components.messaging.service import serve_calls
from components.process import drain, new_instance_id, record_maker, run, settle, stop_signal, subject_of
from components.structured.masks import open_masks
from components.structured.metrics import ConstraintMetrics
from components.telemetry.logs import log_progress, log_ready
from components.telemetry.process_health import serve_health
from components.telemetry.spans import start_telemetry
from components.telemetry.worker_metrics import WorkerMetrics
from engine.model.resolve import model_dir, served_name
from engine.ports import max_request_pages
from engine.profiler import EngineProfiler
from engine.start import start_engine
from services.prefill.config import PrefillSettings
from services.prefill.handlers import PrefillService


async def main(settings: PrefillSettings) -> None:
    """Serve prefill: compute prompts, write their pages, leave when the last transfer is over."""
    me = new_instance_id()
    subject = subject_of(settings.namespace, "prefill", me)
    model = settings.served_model_name or served_name(settings.model)
    open_transfer = kv_opener(settings.kv_transfer)  # before the engine: a wrong name shall not cost a model's start
    registration = Registration(me)
    metrics = WorkerMetrics()
    async with (
        start_telemetry(settings, "prefill", me),
        connect_bus(settings.nats_url, f"prefill-{me}") as bus,
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
            f"prefill-{me}",
            settings.kv_transfer_host or own_address(settings.etcd_url),
            max_request_pages(engine.engine),
        ) as transfer,
        keep_profiles(f"prefill {me}", EngineProfiler(engine, {"role": "prefill", "instance": me})) as profiles,
        publish_kv_events(
            bus,
            subject,
            me,
            lambda: registration.epoch,
            on=settings.engine.kv_events,
            rest_s=partial(FleetSizes(registry.book).kv_events_rest_s, "prefill"),
        ) as kv_events,
        serve_health(settings, metrics.registry, bus, registry, registration) as page,
        keep_present(bus, registry.book),
    ):
        service = PrefillService(
            bus,
            registration,
            registry,
            engine,
            transfer,
            metrics=metrics,
            bootstrap_timeout_s=settings.bootstrap_timeout_s,
            masks=masks,
        )
        adapters = engine.engine.adapters
        record = record_maker(
            settings,
            "prefill",
            me,
            model=model,
            adapters=adapters,
            kv=transfer.endpoint,
            http=page,
            kv_events=settings.engine.kv_events,
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
            serve_calls(bus, "prefill", subject, endpoints, {"instance_id": me, "model": model}),
            send_heartbeats(
                bus,
                subject,
                service.heartbeat,
                partial(FleetSizes(registry.book).heartbeat_rest_s, "prefill"),
                kv_events.log.num_cached,
            ) as heart,
            registry.advertise(registration, record),
        ):
            engine.on_output(lambda output: heart.stepped(output.stats.step))
            settle()
            log_ready(instance=me, model=model, metrics=page)
            await first(stop_signal(), raises(engine.failed()))
            await drain(service, settings.drain_timeout_s, heart.at_once)


if __name__ == "__main__":
    run(main(PrefillSettings.read()))
