"""A load balancer: each request goes to the next ready frontend.

If none is ready, as during an outage of NATS, it uses all: they let requests wait.
"""

import threading
from collections.abc import Iterator
from itertools import count
from typing import Final, Self

import httpx

from tests.waiting import wait_until

CHECK_EVERY_S: Final = 0.1


class Balancer:
    """Checks all frontends in a thread, while inside. It is an endless iterator of base URLs."""

    def __init__(self) -> None:
        self._urls: tuple[str, ...] = ()
        self._ready: tuple[str, ...] = ()
        self._turn = count()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._check_on, name="balancer")

    def add(self, url: str) -> None:
        """Return once it is ready."""
        self._urls = (*self._urls, url)
        wait_until(lambda: url in self._ready, f"{url} is ready")

    def remove(self, url: str) -> None:
        self._urls = tuple(one for one in self._urls if one != url)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        ready = self._ready or self._urls
        return ready[next(self._turn) % len(ready)]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _check_on(self) -> None:
        with httpx.Client(timeout=1.0) as http:
            while not self._over.wait(CHECK_EVERY_S):
                self._ready = tuple(url for url in self._urls if _is_ready(http, url))


def _is_ready(http: httpx.Client, url: str) -> bool:
    try:
        return http.get(f"{url}/ready").status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False
