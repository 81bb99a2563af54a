"""A frontend over a mesh in memory, in a process of its own; it says its URL, and serves until it is killed."""

import asyncio
import sys

from prometheus_client import CollectorRegistry

from components.http.server import serve_http
from components.process import run
from services.frontend.app import create_app
from services.frontend.config import FrontendSettings
from tests.components.text.tiny_model import tiny_text_model
from tests.services.frontend.fake_mesh import FakeMesh


async def main() -> None:
    settings, registry = FrontendSettings(port=0), CollectorRegistry()
    app = create_app(FakeMesh(tiny_text_model()), tiny_text_model(), settings, registry)
    async with serve_http(app, settings, registry=registry) as url:
        sys.stderr.write(f"url={url}\n")
        await asyncio.Event().wait()


if __name__ == "__main__":
    run(main())
