"""Two ranks whose pages hold 8-bit floats give the ids of one, and each side can continue the other's requests."""

from pathlib import Path

from engine.ports import EngineRequest
from tests.engine.parallel.led import led
from tests.engine.test_eight_bit_kv import EIGHT, SEEDED
from tests.engine.tiny_engine import load_tiny, make_engine, prompt, run


def test_ids_are_those_of_one_rank_and_pages_in_files_are_shared(tiny_dir: Path, tmp_path: Path) -> None:
    asked = [EngineRequest(f"r{i}", prompt(30 + 40 * i, start=i), SEEDED) for i in range(3)]
    one = make_engine(load_tiny(tiny_dir, kv_dtype=EIGHT), kv_store_dir=tmp_path)
    wanted = run(one, asked).tokens
    one.close()
    with led(tiny_dir, 2, kv_dtype=EIGHT) as two:
        assert run(two.make(num_pages=200), asked).tokens == wanted
        seen = run(two.make(kv_store_dir=tmp_path), asked[2:])
    assert (seen.tokens["r2"], seen.cached["r2"]) == (wanted["r2"], 96)
