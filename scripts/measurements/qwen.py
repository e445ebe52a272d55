"""Memory of the Qwen2.5 models: weights and a block of K/V, by this library's own formulas."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_paged.cache.kv_format import BlockShape, KVFormat
from mlx_paged.models import qwen2
from mlx_paged.weights.precision import Precision, nbytes_in

# hidden size, layers, intermediate size, query heads, KV heads, vocabulary, tied embeddings
SHAPES = {
    "0.5B": (896, 24, 4864, 14, 2, 151_936, True),
    "1.5B": (1536, 28, 8960, 12, 2, 151_936, True),
    "3B": (2048, 36, 11_008, 16, 2, 151_936, True),
    "7B": (3584, 28, 18_944, 28, 4, 152_064, False),
    "14B": (5120, 48, 13_824, 40, 8, 152_064, False),
    "32B": (5120, 64, 27_648, 40, 8, 152_064, False),
    "72B": (8192, 80, 29_568, 64, 8, 152_064, False),
}
GROUP_SIZE = 64


def model_args(name: str) -> qwen2.ModelArgs:
    hidden, layers, intermediate, heads, kv_heads, vocabulary, tied = SHAPES[name]
    return qwen2.ModelArgs(
        model_type="qwen2",
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=intermediate,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        rms_norm_eps=1e-6,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
    )


@cache
def weights_nbytes(name: str, bits: int) -> int:
    """Bytes of the weights in bfloat16, or quantised to 8 or 4 bits in groups of 64."""
    model: Any = qwen2.Model(model_args(name))
    model.set_dtype(mx.bfloat16)
    if bits != 16:
        nn.quantize(model, GROUP_SIZE, bits)
    return nbytes_in(model, Precision.of(model))


def block_shape(name: str, bits: int, block_size: int) -> BlockShape:
    """A block in bfloat16, or quantised to 8 or 4 bits with a scale and a bias per 64 elements."""
    kv_format = KVFormat(mx.bfloat16, None if bits == 16 else bits, GROUP_SIZE)
    return BlockShape.of_model(model_args(name), block_size, kv_format)
