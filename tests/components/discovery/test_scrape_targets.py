import socket

import pytest

from components.discovery.book import InstanceBook
from components.discovery.pages import scrape_targets
from tests.components.discovery.records import record

HERE = socket.gethostname()


def test_targets_are_named_as_the_scraper_reaches_them() -> None:
    book = InstanceBook()
    book.put("d", record("d", host=HERE, model="m", http="http://127.0.0.1:91"))
    book.put("e", record("e", host="other", model="m", http="http://127.0.0.1:92"))
    book.put("n", record("n", host="other"))
    local = scrape_targets(book, "mesh", "127.0.0.1:8000")
    assert [one.targets for one in local] == [["127.0.0.1:91"], ["other:92"]]
    assert local[0].labels == {
        "__scheme__": "http",
        "__metrics_path__": "/metrics",
        "job": "kvmesh-decode",
        "instance": "d",
        "namespace": "mesh",
        "host": HERE,
        "model": "m",
    }
    remote = scrape_targets(book, "mesh", "frontend:9100")
    assert [one.targets for one in remote] == [[f"{HERE}:91"], ["other:92"]]


@pytest.mark.parametrize("address", ["127.0.0.2", "[::1]", "localhost"])
def test_every_loopback_address_of_another_host_is_replaced_by_its_name(address: str) -> None:
    """127.0.0.2 counted as an address that others reach."""
    book = InstanceBook()
    book.put("e", record("e", host="other", model="m", http=f"http://{address}:92"))
    (one,) = scrape_targets(book, "mesh", "127.0.0.2:8000")
    assert one.targets == ["other:92"]
