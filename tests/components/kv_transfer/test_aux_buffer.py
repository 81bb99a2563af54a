import pytest

from components.errors import QueueFull
from components.kv_transfer.aux import CACHE_LINE, DAMAGED_AFTER_S, HEAD, MAX_ALTERNATIVES, AuxBuffer, AuxRecord
from components.wire.logprobs import TokenLogprobs


def test_a_slot_is_whole_cache_lines() -> None:
    assert HEAD.itemsize % CACHE_LINE == 0
    assert AuxBuffer(8).num_bytes == 8 * HEAD.itemsize
    for checksums, lines in ((1, 1), (16, 1), (17, 2), (512, 32)):
        assert AuxBuffer(1, checksums).slot_bytes == HEAD.itemsize + lines * CACHE_LINE


def test_a_record_is_read_as_it_was_written() -> None:
    aux = AuxBuffer(4)
    record = AuxRecord(stamp=2**62, num_pages=2**32 - 1, first_token=-1, num_cached_tokens=7)
    slot = aux.take()
    aux.write(slot, record)
    assert aux.read(slot) == record


TOP = tuple((token_id, -token_id / 4) for token_id in range(MAX_ALTERNATIVES))


@pytest.mark.parametrize("count", [0, 1, 5, MAX_ALTERNATIVES])
@pytest.mark.parametrize("checksums", [None, (1, 2**32 - 1)])
def test_the_first_tokens_logprobs_go_along(count: int, checksums: tuple[int, ...] | None) -> None:
    sends, receives = AuxBuffer(2, 4), AuxBuffer(2, 4)
    record = AuxRecord(1, 2, 3, 4, checksums, logprobs=TokenLogprobs(-0.125, TOP[:count]))
    sends.write(1, record)
    receives.put(receives.take(), sends.raw(1))
    assert receives.read(0) == record
    sends.write(1, AuxRecord(1, 2, 3, 4, checksums))
    assert sends.read(1).logprobs is None, "of the record before it"


@pytest.mark.parametrize("checksums", [None, (), (1, 2, 3)])
def test_room_for_checksums_that_are_not_there_does_not_go_along(checksums: tuple[int, ...] | None) -> None:
    """A slot of a worker with 960 pages a request did not fit into a doorbell's frame, so all transfers failed."""
    sends, receives = AuxBuffer(1, 2560), AuxBuffer(1, 2560)
    sends.write(0, AuxRecord(1, 2, 3, 4, checksums))
    assert len(sends.raw(0)) == HEAD.itemsize + 4 * len(checksums or ())
    receives.put(0, sends.raw(0))
    assert receives.read(0) == AuxRecord(1, 2, 3, 4, checksums)


@pytest.mark.parametrize("field", [name for name in HEAD.names or () if name not in ("reserved", "seal")])
def test_the_records_checksum_covers_every_field(field: str) -> None:
    aux = AuxBuffer(1, 4)
    aux.write(0, AuxRecord(1, 2, 3, 4, (5, 6), logprobs=TokenLogprobs(-0.125, TOP)))
    assert aux.read(0).intact
    assert HEAD.fields is not None
    kind, offset = HEAD.fields[field][:2]
    aux._memory[0, offset + kind.itemsize - 1] ^= 1
    assert not aux.read(0).intact


def test_a_reused_slot_reports_that_nothing_has_landed() -> None:
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


def test_a_slot_is_sealed_for_one_notification_alone() -> None:
    aux = AuxBuffer(2, 4)
    assert not aux.is_sealed(0, "room")
    aux.write(0, AuxRecord(1, 2, 3, 4))
    assert not aux.is_sealed(0, "room")
    aux.seal(0, "room")
    assert aux.is_sealed(0, "room")
    assert not aux.is_sealed(0, "room0")
    assert not aux.is_sealed(1, "room")


@pytest.mark.parametrize("checksums", [None, (5, 6, 7)])
def test_a_sealed_slot_that_has_arrived_in_part_is_none(checksums: tuple[int, ...] | None) -> None:
    ours, theirs = AuxBuffer(1, 4), AuxBuffer(1, 4)
    ours.write(0, AuxRecord(1, 2, 3, 4, checksums, logprobs=TokenLogprobs(-0.125, TOP)))
    ours.seal(0, "room")
    whole = ours._memory[0].copy()
    written = HEAD.itemsize + (len(checksums) * 4 if checksums else 0)
    for arrived in range(written):
        theirs._memory[0] = 0
        theirs._memory[0, :arrived] = whole[:arrived]
        assert not theirs.is_sealed(0, "room") or bytes(theirs._memory[0]) == bytes(whole)
    theirs._memory[0] = whole
    assert theirs.is_sealed(0, "room")


def test_a_seal_that_does_not_fit_is_damage_when_it_has_stood_for_a_while() -> None:
    buffer = AuxBuffer(4)
    slot = buffer.take()
    assert not buffer.is_damaged(slot, 0.0), "nothing has arrived"
    assert not buffer.is_damaged(slot, 9.0)
    buffer.seal(slot, "another room")
    assert not buffer.is_damaged(slot, 10.0)
    assert not buffer.is_damaged(slot, 10.0 + DAMAGED_AFTER_S)
    buffer.seal(slot, "again another")
    assert not buffer.is_damaged(slot, 10.1 + DAMAGED_AFTER_S), "it changes"
    assert buffer.is_damaged(slot, 10.2 + 2 * DAMAGED_AFTER_S)
    buffer.give_back(slot)
    while buffer.take() != slot:
        pass
    buffer.seal(slot, "another room")
    assert not buffer.is_damaged(slot, 100.0), "whoever takes it begins anew"
