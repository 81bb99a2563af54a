"""python -m services.prefill: computes prompts and writes their KV pages into decode's memory."""

from components.process import run
from services.prefill.config import PrefillSettings
from services.prefill.service import PrefillService
from services.worker import open_worker


async def main(settings: PrefillSettings) -> None:
    """Serve until a stop signal, then finish the transfers."""
    async with open_worker(settings, settings.engine, "prefill") as worker:
        service = PrefillService(
            worker.bus,
            worker.registration,
            worker.registry,
            worker.engine,
            worker.transfer,
            metrics=worker.metrics,
            writes=worker.writes,
            bootstrap_timeout_s=settings.bootstrap_timeout_s,
            masks=worker.masks,
        )
        await worker.serve(service, settings.drain_timeout_s, num_cached=worker.kv_events.log.num_cached)


if __name__ == "__main__":
    run(main(PrefillSettings.read()))
