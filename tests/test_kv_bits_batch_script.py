"""scripts/kv_bits_batch.py on a tiny model: what is equal, and what it says of what isn't."""

import json

import _scripts  # noqa: F401
import kv_bits_batch
import numpy as np
import pytest
from greedy import ours_of
from tiny_models import tiny_config, tiny_model, write_checkpoint

from mlx_paged.cache import PagedCache

PROMPTS = [list(range(first, first + length)) for first, length in ((1, 9), (40, 30), (7, 17))]


@pytest.fixture(scope="module")
def model():
    return ours_of(tiny_model(tiny_config()))


@pytest.fixture
def uneven(monkeypatch):
    """Attention that differs by the number of rows alone, in layer 1, by a thousandth."""
    attend = PagedCache.attend

    def call(cache, layer, *arguments):
        output = attend(cache, layer, *arguments)
        is_single = layer == 1 and cache.batch.num_tokens == 1
        return output * 1.001 if is_single else output

    monkeypatch.setattr(PagedCache, "attend", call)


def test_what_the_number_of_rows_changes_is_found(model, uneven):
    found = kv_bits_batch.first_difference(model, PROMPTS, None)
    assert found is not None
    if found["operation"] == "attention of layer 1":  # or BLAS was first, by a last bit
        assert found["rows"] == 3
        assert found["difference"] == pytest.approx(1e-3, rel=0.01)
    else:
        assert found["difference"] < 1e-5


@pytest.mark.parametrize("bits", [None, 4])
def test_each_way_of_answering_is_a_greedy_one(bits, model):
    def answer(prompt):
        pool, (sequence,) = kv_bits_batch.read(model, [prompt], 5, bits)
        for _ in range(5):
            logits = kv_bits_batch.step(model, pool, [sequence], [1])
            sequence.token_ids.append(int(np.array(logits[0]).argmax()))
        return sequence.token_ids[len(prompt) :]

    expected = [answer(prompt) for prompt in PROMPTS]
    for how in kv_bits_batch.HOW:
        assert kv_bits_batch.answers(model, PROMPTS, 5, bits, how) == expected


def test_batches_have_the_rows_that_their_names_say(model):
    pool, sequences = kv_bits_batch.read(model, PROMPTS, 1, None)
    together, alone, among = (kv_bits_batch.batches(pool, sequences, h) for h in kv_bits_batch.HOW)
    assert together == [sequences]
    assert alone == [[sequence] for sequence in sequences]
    for i, (sequence, rows) in enumerate(zip(sequences, among, strict=True)):
        assert len(rows) == len(sequences) and rows[i] is sequence
        assert not any(row is other for row in rows for other in sequences if other is not sequence)


def test_the_rows_of_the_report(tmp_path, capsys):
    config = tiny_config()
    path = write_checkpoint(tmp_path / "model", config, tiny_model(config))
    kv_bits_batch.main(["--model", str(path), "--tokens", "2", "--bits", "16", "8", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert [row["bits"] for row in result["rows"]] == [16, 8]
    for row in result["rows"]:
        assert row["answers"] == row["in the batch"] == row["alone among as many rows"] == 16
