"""A load balancer as clients see it: each request goes to the next frontend whose /ready says yes.

If none is ready, as while NATS is away, it takes all of them: they let requests wait.
"""

import threading
from collections.abc import Iterator
from itertools import count
from typing import Final, Self

import httpx

from tests.waiting import wait_until

CHECK_EVERY_S: Final = 0.1


class Balancer:
    """Asks all frontends in a thread, while inside. It is an iterator of base URLs that does not end."""

    def __init__(self) -> None:
        self._urls: tuple[str, ...] = ()
        self._ready: tuple[str, ...] = ()
        self._turn = count()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._check_on, name="balancer")

    def add(self, url: str) -> None:
        """Returns once it is ready."""
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
