"""scripts/kv_bits.py: what it prints of a tiny model, held to mlx-lm's and to the pool's bytes."""

import json
import math

import _scripts  # noqa: F401
import kv_bits
import mlx.core as mx
import numpy as np
import pytest
from greedy import mlx_lms_of
from measurements.perplexity import AttentionError, Reading, surprises
from tiny_models import tiny_config, tiny_model, write_checkpoint

from mlx_paged.cache.kv_format import KVFormat
from mlx_paged.loader import load

TEXT = "The quick brown fox jumps over the lazy dog, and over the fence. " * 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    config = tiny_config("llama", head_dim=64)
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), config, tiny_model(config))


def test_perplexity_is_that_of_mlx_lm_and_rows_hold_what_pools_take(checkpoint, capsys, tmp_path):
    file, picture = tmp_path / "text.txt", tmp_path / "kv.png"
    file.write_text(TEXT)
    options = ["--model", str(checkpoint), "--text", str(file), "--tokens", "150", "--window", "70"]
    kv_bits.main([*options, "--chunk", "9", "--json", "--plot", str(picture)])
    result = json.loads(capsys.readouterr().out)
    plain, eight, four = result["rows"]
    loaded = load(checkpoint)
    reference, tokens = mlx_lms_of(loaded), loaded.tokenizer.encode(TEXT)[:150]
    losses = []
    for start in (0, 70, 140):
        window = mx.array(tokens[start : start + 70])
        logits = reference(window[None])[0, :-1]
        losses.append(
            np.array(mx.logsumexp(logits, -1) - logits[mx.arange(len(window) - 1), window[1:]])
        )
    assert plain["perplexity"] == pytest.approx(math.exp(np.concatenate(losses).mean()), rel=1e-4)
    assert [row["bytes_per_token"] for row in result["rows"]] == [1024, 576, 320]
    assert abs(eight["perplexity_change"]) < abs(four["perplexity_change"])
    assert 0 < 5 * eight["attention_error"] < four["attention_error"]
    assert four["attention_error"] < four["attention_error_worst_layer"]
    assert plain["requests"] < eight["requests"] < four["requests"]
    assert picture.stat().st_size > 0


def test_watching_attention_changes_nothing_and_sees_no_error_in_the_same_format(checkpoint):
    loaded = load(checkpoint)
    reading = Reading(loaded.model, loaded.tokenizer.encode(TEXT)[:40], window=24, chunk=7)
    eight, plain = KVFormat(mx.float32, 8), KVFormat(mx.float32)
    same, other = AttentionError(eight), AttentionError(plain)
    chunks = []
    watched = surprises(reading, eight, lambda: chunks.append(1), [same, other])
    assert np.array_equal(watched, surprises(reading, eight, lambda: None))
    assert len(chunks) == reading.num_chunks == 4 + 3
    assert same.relative == same.worst_layer == 0 < other.relative


def test_the_default_text_is_long_enough_for_the_default_tokens():
    text = kv_bits.read_text(None)
    assert len(text) > 100_000
    assert kv_bits.read_text(None) == text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--group-size", "16"], "invalid choice"),
        (["--tokens", "1"], "1 is not a whole number of at least 2"),
        (["--chunk", "x"], "x is not a whole number of at least 1"),
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_named(options, message, capsys):
    with pytest.raises(SystemExit):
        kv_bits.parse_arguments(options)
    assert message in capsys.readouterr().err


def test_a_file_that_is_no_text_is_one_sentence(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere\.txt can't be read as text"):
        kv_bits.read_text(tmp_path / "nowhere.txt")
