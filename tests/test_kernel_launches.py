"""scripts/kernel_launches.py: launches and bytes, held to what can be counted by hand."""

import json

import _scripts  # noqa: F401
import kernel_launches
import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_paged.cache.kv_format import KVFormat
from mlx_paged.kernels import metal
from mlx_paged.models import qwen2

# q, k and v with their biases, o, gate, up, down; two norms, two sums, and gate times up.
LAYER = {"AddMM": 3, "Matmul": 4, "RMSNorm": 2, "Add": 2, "Compiled": 1, "RoPE": 2}


@pytest.mark.parametrize(
    ("rows", "kv_bits", "more"),
    [
        ([(99, 1)], None, {"our decode": 1, "ScatterAxis": 2}),
        ([(1023, 1)], None, {"our decode": 1, "our merge": 1, "ScatterAxis": 2}),
        ([(0, 40)], None, {"our prefill": 1, "ScatterAxis": 2}),
        ([(9, 1), (0, 40)], None, {"our decode": 1, "our prefill": 1, "ScatterAxis": 2}),
        ([(99, 1)], 4, {"our decode": 1, "ScatterAxis": 6, "Quantize": 2}),
    ],
    ids=str,
)
def test_a_layers_launches(rows, kv_bits, more):
    joined = {"Concatenate": 2} if len(rows) == 2 else {}
    assert kernel_launches.per_layer(rows, None, kv_bits) == {**LAYER, **more, **joined}


def test_rope_and_write_as_one_kernel_would_take_a_launch_for_four_or_ten(capsys):
    for options, fewer in (([], 3), (["--kv-bits", "8"], 9)):
        kernel_launches.main([*options, "--json"])
        result = json.loads(capsys.readouterr().out)
        for name, counts in result["launches_per_layer"].items():
            fused = result["launches_per_layer_with_one_kernel"][name]
            assert sum(counts.values()) - fused == fewer


def test_nothing_is_left_in_place_of_mlxs_functions():
    before = mx.fast.rope, mx.fast.rms_norm, mx.quantize, metal.is_available()
    kernel_launches.per_layer([(9, 1)], None, None)
    assert (mx.fast.rope, mx.fast.rms_norm, mx.quantize, metal.is_available()) == before


def test_bytes_of_a_small_model():
    shape = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 50}
    sizes = kernel_launches.Sizes(**shape, num_layers=3, num_heads=2, num_kv_heads=1, head_dim=32)
    heads = {"num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = qwen2.Model(qwen2.ModelArgs("qwen2", rms_norm_eps=1e-6, **shape, **heads))
    weights = tree_flatten(model.parameters())
    assert sizes.weight_elements == sum(array.size for _, array in weights if array.ndim == 2)
    kv = KVFormat(mx.float16)
    step = kernel_launches.step_bytes(sizes, kv, num_rows=5, context=7)
    assert step["attention"] == 3 * 5 * 7 * 2 * 32 * 2
    query, key = 2 * 32 * 2, 32 * 2
    rope = (query + key) * 2
    assert step["rope_and_write"] == 3 * 5 * (rope + 4 * key)
    assert step["rope_and_write"] - step["fused"] == 3 * 5 * 2 * key
