"""Small random checkpoints, written with mlx-lm's own classes, and a cache to run ours on."""

import importlib
import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm.utils import save_config

VOCAB_SIZE = 260


def tiny_config(model_type="qwen2", **changes):
    return {
        "model_type": model_type,
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCAB_SIZE,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 256,
        **changes,
    }


def tiny_model(config, dtype=mx.float32, seed=0):
    """A random mlx-lm model; biases are not zero and norms not one, as in trained models."""
    arch = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = arch.Model(arch.ModelArgs.from_dict(config))
    mx.random.seed(seed)
    random = tree_map(
        lambda a: mx.random.normal(a.shape) * 0.2 + (a.ndim == 1) * 0.1, model.parameters()
    )
    model.update(tree_map(lambda a: a.astype(dtype), random))
    mx.eval(model.parameters())
    return model


def write_checkpoint(path: Path, config, model, num_shards=1, tokenizer=True):
    """A folder as mlx_lm.convert writes it, with a byte-level tokenizer."""
    path.mkdir(parents=True, exist_ok=True)
    weights = tree_flatten(model.parameters())
    if num_shards == 1:
        mx.save_safetensors(str(path / "model.safetensors"), dict(weights))
    else:
        weight_map = {}
        for shard in range(num_shards):
            name = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
            part = dict(weights[shard::num_shards])
            mx.save_safetensors(str(path / name), part)
            weight_map |= dict.fromkeys(part, name)
        index = {"metadata": {}, "weight_map": weight_map}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_config(dict(config), path / "config.json")
    if tokenizer:
        write_tokenizer(path)
    return path


def write_tokenizer(path: Path):
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


def quantize(model, config, group_size, bits, overrides=None):
    """Quantises in place; `overrides` maps a module's path to its own settings or to False."""
    overrides = overrides or {}

    def settings(path, module):
        if not hasattr(module, "to_quantized"):
            return False
        return overrides.get(path, True)

    nn.quantize(model, group_size, bits, class_predicate=settings)
    mx.eval(model.parameters())
    return {**config, "quantization": {"group_size": group_size, "bits": bits, **overrides}}


class OneSequence:
    """The least cache that our models run on: one prompt, causal attention over itself."""

    def __init__(self, num_tokens):
        self.positions = mx.arange(num_tokens)

    def attend(self, layer, queries, keys, values, scale, window=None):
        assert window is None
        queries, keys, values = (a.swapaxes(0, 1)[None] for a in (queries, keys, values))
        output = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=scale, mask="causal"
        )
        return output[0].swapaxes(0, 1)


def our_logits(model, token_ids):
    return model(mx.array(token_ids), OneSequence(len(token_ids))).astype(mx.float32)


def mlx_lm_logits(model, token_ids):
    return model(mx.array([token_ids]))[0].astype(mx.float32)
