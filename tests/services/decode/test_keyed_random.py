import os

import pytest

from services.decode.keyed_random import KeyedRandom


@pytest.mark.parametrize("bits", [1, 62, 63, 64, 128])
def test_numbers_have_that_many_bits_and_do_not_repeat(bits: int) -> None:
    draw = KeyedRandom()
    numbers = [draw(bits) for _ in range(200)]
    assert max(numbers).bit_length() == bits
    assert bits < 62 or len(set(numbers)) == 200


def test_two_processes_draw_different_numbers() -> None:
    assert KeyedRandom()(63) != KeyedRandom()(63)


def test_the_kernel_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(os, "urandom", lambda size: asked.append(size) or bytes(range(size)))  # type: ignore[func-returns-value]
    draw = KeyedRandom()
    assert not asked
    assert len({draw(63) for _ in range(100)}) == 100
    assert asked == [32]
