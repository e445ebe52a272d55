"""A Llama GGUF file, written out as an mlx-lm checkpoint folder.

Covers what the demo model needs: llama architecture, a GPT-2 style tokenizer, and the tensor
types that `mx.load` keeps quantised (Q4_0, Q4_1, Q8_0: groups of 32) or reads as floats.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_paged.weights.errors import ModelError

GROUP_SIZE = 32
SPECIAL_TOKEN_TYPE = 3

MODULE_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(gguf: Path, folder: Path, model_type: str = "llama") -> None:
    """Writes the model in `gguf` into the existing `folder`, as `model_type` llama or qwen2.

    qwen2 is the same network with zero biases on the query, key and value projections.
    Raises ModelError if the file can't be read or holds something else than a llama.
    """
    tensors: Any
    metadata: Any
    try:
        tensors, metadata = mx.load(str(gguf), return_metadata=True)
    except (RuntimeError, ValueError) as error:
        raise ModelError(
            f"{gguf} can't be read as GGUF ({error}); install its package again"
        ) from error
    if metadata.get("general.architecture") != "llama":
        raise ModelError(
            f"{gguf} holds a {metadata.get('general.architecture')} model, not a llama"
        )
    weights = _weights(tensors, metadata)
    if model_type == "qwen2":
        weights |= _zero_biases(weights)
    config = _config(weights, metadata, model_type)
    _write_json(folder / "config.json", config)
    _write_json(
        folder / "generation_config.json",
        {key: config[key] for key in ("bos_token_id", "eos_token_id")},
    )
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    _write_tokenizer(folder, metadata)


def _number(metadata: dict[str, Any], key: str) -> Any:
    return metadata[key].item()


def _weights(tensors: dict[str, mx.array], metadata: dict[str, Any]) -> dict[str, mx.array]:
    num_heads = {
        "attn_q": _number(metadata, "llama.attention.head_count"),
        "attn_k": _number(metadata, "llama.attention.head_count_kv"),
    }
    weights = {}
    for name, tensor in tensors.items():
        *block, module, kind = name.split(".")
        prefix = f"model.layers.{block[1]}." if block else ""
        if module in num_heads:
            tensor = _split_halves(tensor, num_heads[module])
        if tensor.dtype == mx.float32:
            # The norms: alone in float32, they would lift every activation to it.
            tensor = tensor.astype(mx.float16)
        weights[f"{prefix}{MODULE_NAMES[module]}.{kind}"] = tensor
    return weights


def _split_halves(rows: mx.array, num_heads: int) -> mx.array:
    """Undoes GGUF's order of query and key rows, [num_heads * head_dim, ...].

    Rope turns dimension j together with j + head_dim / 2. GGUF stores the two of a pair next to
    each other; a checkpoint stores all first halves, then all second halves.
    """
    pairs = rows.reshape(num_heads, -1, 2, rows.shape[-1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _zero_biases(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    suffixes = tuple(f".self_attn.{name}_proj.weight" for name in "qkv")
    return {
        name.removesuffix("weight") + "bias": mx.zeros(weight.shape[0], mx.float16)
        for name, weight in weights.items()
        if name.endswith(suffixes)
    }


def _config(
    weights: dict[str, mx.array], metadata: dict[str, Any], model_type: str
) -> dict[str, Any]:
    quantization = _quantization(weights)
    architecture = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}[model_type]
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": _number(metadata, "llama.embedding_length"),
        "intermediate_size": _number(metadata, "llama.feed_forward_length"),
        "num_hidden_layers": _number(metadata, "llama.block_count"),
        "num_attention_heads": _number(metadata, "llama.attention.head_count"),
        "num_key_value_heads": _number(metadata, "llama.attention.head_count_kv"),
        "rms_norm_eps": round(_number(metadata, "llama.attention.layer_norm_rms_epsilon"), 12),
        "rope_theta": _number(metadata, "llama.rope.freq_base"),
        "max_position_embeddings": _number(metadata, "llama.context_length"),
        "vocab_size": _number(metadata, "llama.vocab_size"),
        "tie_word_embeddings": "lm_head.weight" not in weights,
        "bos_token_id": _number(metadata, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _number(metadata, "tokenizer.ggml.eos_token_id"),
        "torch_dtype": "float16",
    }
    if quantization:
        config |= {"quantization": quantization, "quantization_config": quantization}
    return config


def _quantization(weights: dict[str, mx.array]) -> dict[str, Any]:
    """mlx-lm's quantization entry: the commonest bit width, and the modules that differ."""
    bits = {
        name.removesuffix(".scales"): _bits(weights, name.removesuffix(".scales"))
        for name in weights
        if name.endswith(".scales")
    }
    if not bits:
        return {}
    widths = list(bits.values())
    default = max(set(widths), key=widths.count)
    overrides = {
        module: {"group_size": GROUP_SIZE, "bits": width}
        for module, width in bits.items()
        if width != default
    }
    return {"group_size": GROUP_SIZE, "bits": default, "mode": "affine", **overrides}


def _bits(weights: dict[str, mx.array], module: str) -> int:
    num_words = weights[f"{module}.weight"].shape[-1]
    num_groups = weights[f"{module}.scales"].shape[-1]
    return num_words * 32 // (num_groups * GROUP_SIZE)


def _write_tokenizer(folder: Path, metadata: dict[str, Any]) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = (metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise ModelError(f"the GGUF file's tokenizer is of kind {kind}, not ('gpt2', 'smollm')")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata["tokenizer.ggml.token_type"].tolist()
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}

    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, token_type in zip(tokens, types, strict=True)
            if token_type == SPECIAL_TOKEN_TYPE
        ]
    )
    tokenizer.save(str(folder / "tokenizer.json"))

    def token(name: str) -> str:
        return tokens[_number(metadata, f"tokenizer.ggml.{name}_token_id")]

    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": token("bos"),
            "eos_token": token("eos"),
            "pad_token": token("padding"),
            "unk_token": token("unknown"),
            "clean_up_tokenization_spaces": False,
            "model_max_length": _number(metadata, "llama.context_length"),
            "chat_template": metadata["tokenizer.chat_template"],
        },
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
