"""A frontend whose page shows a mesh in memory, which changes 30 times a second: `serve_many INSTANCES [API KEY]`."""

import asyncio
import random
import sys
import time
from typing import Any, Final

from components.aio import background
from components.api_keys import parse_file
from components.http.server import serve_http
from components.process import run
from services.frontend.app import create_app
from services.frontend.config import FrontendSettings
from services.frontend.keys import KeyRing
from services.frontend.ui.feed import View
from tests.components.text.tiny_model import tiny_text_model
from tests.services.frontend.fake_mesh import FakeMesh
from tests.services.frontend.ui.parts import FakeReader, long_trace, make_page, trace

EVERY_S: Final = 1 / 30
ABOUT: Final = {"namespace": "many", "model": "tiny", "frontend": "00000000", "version": "0"}


class ManyInstances:
    """Half of them are prefill, half decode; all change at each read."""

    def __init__(self, count: int) -> None:
        self._rng = random.Random(1)
        self._started = int(time.time()) - 3600
        roles = [("frontend", 0), ("bootstrap", 0)] + [("prefill" if i % 2 else "decode", i) for i in range(count - 2)]
        self._roles = {f"{self._rng.getrandbits(32):08x}": role for role, _ in roles}
        workers = {role: [i for i, of in self._roles.items() if of == role] for role in ("prefill", "decode")}
        self._pairs = [(p, self._rng.choice(workers["decode"])) for p in workers["prefill"] for _ in range(3)]
        self._looks = 0

    def look(self) -> View:
        self._looks += 1
        links = {
            f"{p}>{d}": {
                "from": p,
                "to": d,
                "transfers": self._looks,
                "failures": 0,
                "seconds": 0.02 * self._looks,
                "bytes": 10**6 * self._looks,
                "bytes_per_s": self._rng.randrange(10**8),
            }
            for p, d in self._pairs
        }
        return View({name: self._instance(name, role) for name, role in self._roles.items()}, links, ABOUT)

    def _instance(self, name: str, role: str) -> dict[str, Any]:
        number = int(name, 16)
        state = {0: "draining", 1: "silent", 2: "warming"}.get(number % 40, "up")
        of: dict[str, Any] = {"role": role, "state": state, "host": "h", "pid": 1, "started": self._started}
        if role in ("prefill", "decode"):
            held = int(500 + 450 * self._rng.random() * (number % 7) / 6)
            of |= {"running": self._rng.randrange(24), "waiting": self._rng.randrange(3), "rooms": number % 3}
            of |= {"held": held, "cached": 200, "free": 800 - held // 2, "total": 2000, "tps": self._rng.randrange(900)}
        return of


async def main(count: int, key: str = "") -> None:
    settings = FrontendSettings(port=0)
    reader = FakeReader([trace(), long_trace(2000)])
    ui = make_page(ManyInstances(count).look, every_s=EVERY_S, reader=reader)
    keys = KeyRing(parse_file(f'[one]\nkey = "{key}"\n')) if key else None
    app = create_app(FakeMesh(tiny_text_model()), tiny_text_model(), settings, keys=keys, ui=ui)
    async with background(ui.feed.run(), "feed"), serve_http(app, settings) as url:
        sys.stderr.write(f"url={url}\n")
        await asyncio.Event().wait()


if __name__ == "__main__":
    run(main(int(sys.argv[1]), *sys.argv[2:]))
