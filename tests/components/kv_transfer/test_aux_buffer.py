import pytest

from components.errors import QueueFull
from components.kv_transfer.aux import HEAD, AuxBuffer, AuxRecord


def test_a_slot_is_one_cache_line() -> None:
    assert HEAD.itemsize == 64
    assert AuxBuffer(8).num_bytes == 8 * 64


def test_a_record_is_read_as_it_was_written() -> None:
    aux = AuxBuffer(4)
    record = AuxRecord(stamp=2**62, num_pages=2**32 - 1, first_token=-1, num_cached_tokens=7)
    slot = aux.take()
    aux.write(slot, record)
    assert aux.read(slot) == record


def test_a_slot_taken_again_says_that_nothing_has_landed() -> None:
    aux = AuxBuffer(1)
    aux.write(aux.take(), AuxRecord(1, 2, 3, 4))
    aux.give_back(0)
    assert aux.read(aux.take()) == AuxRecord(0, 0, 0, 0)


def test_slots_are_held_by_one_transfer_each_and_run_out() -> None:
    aux = AuxBuffer(3)
    assert {aux.take() for _ in range(3)} == {0, 1, 2}
    with pytest.raises(QueueFull, match="all 3 aux slots"):
        aux.take()
    aux.give_back(1)
    assert aux.num_free == 1
    assert aux.take() == 1


def test_a_slot_given_back_twice_is_our_bug() -> None:
    aux = AuxBuffer(2)
    slot = aux.take()
    aux.give_back(slot)
    with pytest.raises(AssertionError, match="free already"):
        aux.give_back(slot)
