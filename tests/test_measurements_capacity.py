"""How much of a Mac the weights leave, and how many requests fit in it."""

import json

import _scripts  # noqa: F401
import capacity
import mlx.core as mx
import pytest
from measurements import qwen, reservations

from mlx_paged.cache import KVPool
from mlx_paged.memory import MemoryLimit

GIB = 2**30
# Parameters as the models' authors give them, in billions.
PARAMETERS = {"0.5B": 0.49, "1.5B": 1.54, "3B": 3.09, "7B": 7.61, "14B": 14.7, "32B": 32.5}


@pytest.mark.parametrize("name", PARAMETERS)
def test_weights_take_two_bytes_a_parameter_or_four_and_a_half_bits(name):
    nbytes = qwen.weights_nbytes(name, 16)
    assert nbytes / 2e9 == pytest.approx(PARAMETERS[name], rel=0.01)
    # Norms and biases stay in 16 bits.
    assert qwen.weights_nbytes(name, 4) == pytest.approx(nbytes * 4.5 / 16, rel=2e-3)
    assert qwen.weights_nbytes(name, 8) == pytest.approx(nbytes * 8.5 / 16, rel=2e-3)


def test_a_block_is_what_a_pool_of_one_block_takes():
    args = qwen.model_args("0.5B")
    pool = KVPool(
        args.num_hidden_layers,
        args.num_key_value_heads,
        args.attention_head_dim,
        num_blocks=1,
        block_size=16,
        dtype=mx.bfloat16,
    )
    assert qwen.block_shape("0.5B", 16, 16).nbytes == pool.block_nbytes
    assert qwen.block_shape("1.5B", 16, 16).nbytes == 458_752  # 28 layers, 2 heads of 128
    packed = mx.quantize(mx.zeros((16 * args.num_key_value_heads, 64)), group_size=64, bits=4)
    nbytes = packed[0].nbytes + 2 * (packed[1].size + packed[2].size)
    assert qwen.block_shape("0.5B", 4, 16).nbytes == 2 * args.num_hidden_layers * nbytes


def test_slots_fill_nine_tenths_of_the_working_set_beside_the_weights():
    limit = MemoryLimit(capacity.working_set(16), "")
    slots = capacity.num_slots("1.5B", 4, 16, limit, 16)
    taken = qwen.weights_nbytes("1.5B", 4) + slots // 16 * 458_752
    assert 0 <= 0.9 * 16 * GIB * 2 / 3 - taken < 458_752 + 1
    assert capacity.num_slots("72B", 16, 16, limit, 16) == 0


def test_rows_hold_what_lengths_need(capsys, tmp_path):
    file = tmp_path / "mine.json"
    pairs = [(100, 50), (700, 300)]
    file.write_text(json.dumps(pairs))
    options = ["--models", "0.5B", "3B", "--weights", "4", "--memory", "8", "16"]
    capacity.main([*options, "--json", "--lengths", str(file)])
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["model"], row["memory_gb"]) for row in rows] == [
        (f"Qwen2.5-{model}", memory) for model in ("0.5B", "3B") for memory in (8, 16)
    ]
    paged = sum(16 * -(-(p + t) // 16) for p, a in pairs for t in range(1, a + 1)) / 350
    for row in rows:
        assert row["at_once"]["max"] == row["num_slots"] // reservations.WINDOW
        assert row["at_once"]["paged"] == int(row["num_slots"] // paged)


def test_a_picture_is_drawn(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "capacity.png"
    capacity.main(["--models", "0.5B", "--requests", "9", "--plot", str(file)])
    assert file.read_bytes().startswith(b"\x89PNG")
    assert "ShareGPT requests at once" in capsys.readouterr().out
