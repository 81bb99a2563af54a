from components.discovery.book import InstanceBook
from components.wire.instances import InstanceRecord
from tests.components.discovery.records import record


def followed() -> tuple[InstanceBook, list[tuple[str | None, str | None]]]:
    """Return a book, and a list of (epoch before, epoch after) of its changes."""
    book = InstanceBook()
    changes: list[tuple[str | None, str | None]] = []

    def listen(was: InstanceRecord | None, now: InstanceRecord | None) -> None:
        changes.append((was.epoch if was else None, now.epoch if now else None))

    book.subscribe(listen)
    return book, changes


def test_listeners_get_each_join_new_epoch_and_leave_once() -> None:
    book, changes = followed()
    for epoch in ("1", "1", "2"):
        book.put("k", record(epoch=epoch))
    book.remove("k")
    book.remove("k")
    assert changes == [(None, "1"), ("1", "2"), ("2", None)]


def test_a_follower_of_a_role_gets_its_records_and_their_changes() -> None:
    """Decode logged no line for a bootstrap of another release that had registered before it started."""
    book, changes = InstanceBook(), []
    book.put("a", record("a", "1"))
    book.put("p", record("p", "2", role="prefill"))
    book.follow("decode", lambda was, now: changes.append((was and was.epoch, now and now.epoch)))
    book.put("b", record("b", "3"))
    book.put("q", record("q", "4", role="prefill"))
    book.remove("p")
    book.remove("a")
    assert changes == [(None, "1"), (None, "3"), ("1", None)]


def test_a_fresh_read_notifies_of_differences_only() -> None:
    book, changes = followed()
    book.replace_all({"a": record("a", "1"), "b": record("b", "2"), "c": record("c", "3")})
    changes.clear()
    book.replace_all({"b": record("b", "2"), "c": record("c", "4"), "d": record("d", "5")})
    assert sorted(changes, key=str) == sorted([("1", None), ("3", "4"), (None, "5")], key=str)


def test_instances_are_found_by_role_in_one_order_everywhere() -> None:
    book, _ = followed()
    for name in "cab":
        book.put(name, record(name))
    book.put("p", record("p", role="prefill"))
    assert [r.instance_id for r in book.of_role("decode")] == ["a", "b", "c"]


def test_an_instance_is_found_in_the_epoch_asked_for() -> None:
    book, _ = followed()
    book.put("k", record("one", "2"))
    assert book.find("decode", "one") == book.find("decode", "one", "2") == record("one", "2")
    assert book.find("decode", "one", "1") is None
    assert book.find("decode", "two") is None


def test_instances_of_two_roles_may_have_one_id() -> None:
    book, _ = followed()
    for role in ("prefill", "decode"):
        book.put(role, record("host", role=role))
    assert book.find("decode", "host") == record("host", role="decode")
    assert book.find("bootstrap", "host") is None


def test_a_record_in_doubt_stays_until_it_is_dropped_or_comes_back() -> None:
    """An etcd that lost its data, or a process cut off from etcd, took healthy workers out of the mesh."""
    book, changes = followed()
    missing: list[str] = []
    book.on_missing = missing.append
    for name in "abc":
        book.put(name, record(name, "1"))
    changes.clear()
    book.replace_all({"c": record("c", "1")})
    book.remove("a")
    assert sorted(missing) == ["a", "b"]
    assert book.missing_in_etcd == {"a", "b"}
    assert [r.instance_id for r in book.of_role("decode")] == ["a", "b", "c"]
    assert changes == []
    book.put("a", record("a", "1"))
    book.drop("b")
    assert changes == [("1", None)]
    assert book.missing_in_etcd == set()
    assert book.at("b") is None
    book.remove("a")
    assert sorted(missing) == ["a", "a", "b"]
