"""Qwen2 and Qwen2.5, over a flat list of tokens and a paged KV cache.

With `use_sliding_window`, layers from `max_window_layers` on attend over a window, as the
architecture defines it. mlx-lm's Qwen2 leaves it out and attends over everything, so beyond the
window its answers differ.
"""

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import swiglu
from mlx_lm.models.base import BaseModelArgs
from mlx_lm.models.rope_utils import initialize_rope

FULL, SLIDING = "full_attention", "sliding_attention"  # layer types


@dataclass
class ModelArgs(BaseModelArgs):
    model_type: str
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    rms_norm_eps: float
    vocab_size: int
    num_key_value_heads: int
    max_position_embeddings: int = 32768
    rope_theta: float = 1000000
    rope_traditional: bool = False
    rope_scaling: dict[str, float | str] | None = None
    tie_word_embeddings: bool = True
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    layer_types: list[str] | None = None

    def __post_init__(self) -> None:
        scaling = self.rope_scaling or {}
        if (scaling.get("type") or scaling.get("rope_type")) == "dynamic":
            raise ValueError(
                "dynamic rope scaling depends on the length of the whole sequence, so the tokens "
                "of a flat batch can't be turned together; use linear, llama3 or yarn scaling"
            )
        if len(self.windows) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types has {len(self.windows)} entries for {self.num_hidden_layers} layers"
            )

    @property
    def windows(self) -> list[int | None]:
        """How many tokens a token sees in each layer, itself included; None for all before it."""
        types = self.attention_types
        if unknown := sorted(set(types) - {FULL, SLIDING}):
            raise ValueError(f"layers are of {FULL} or {SLIDING}, and not {', '.join(unknown)}")
        if SLIDING in types and (self.sliding_window or 0) < 1:
            raise ValueError(
                f"layers of {SLIDING} need a sliding_window of at least 1 token, and it is "
                f"{self.sliding_window}"
            )
        return [self.sliding_window if kind == SLIDING else None for kind in types]

    # What architectures of the same shape choose differently.

    @property
    def attention_head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def has_qkv_bias(self) -> bool:
        return True

    @property
    def has_output_bias(self) -> bool:
        return False

    @property
    def attention_types(self) -> list[str]:
        layers = range(self.num_hidden_layers)
        if not self.use_sliding_window or self.sliding_window is None:
            return [FULL for _ in layers]
        first = self.max_window_layers
        return self.layer_types or [SLIDING if layer >= first else FULL for layer in layers]

    @property
    def has_mlp_bias(self) -> bool:
        return False


class Attention(nn.Module):
    def __init__(self, args: ModelArgs, layer: int):
        super().__init__()
        dim = args.hidden_size
        self.layer = layer
        self.n_heads = n_heads = args.num_attention_heads
        self.n_kv_heads = n_kv_heads = args.num_key_value_heads
        self.head_dim = head_dim = args.attention_head_dim
        self.scale = head_dim**-0.5
        self.window = args.windows[layer]

        self.q_proj = nn.Linear(dim, n_heads * head_dim, bias=args.has_qkv_bias)
        self.k_proj = nn.Linear(dim, n_kv_heads * head_dim, bias=args.has_qkv_bias)
        self.v_proj = nn.Linear(dim, n_kv_heads * head_dim, bias=args.has_qkv_bias)
        self.o_proj = nn.Linear(n_heads * head_dim, dim, bias=args.has_output_bias)

        self.rope = initialize_rope(
            head_dim,
            base=args.rope_theta,
            traditional=args.rope_traditional,
            scaling_config=args.rope_scaling,
            max_position_embeddings=args.max_position_embeddings,
        )

    def __call__(self, x: mx.array, cache) -> mx.array:
        num_tokens = x.shape[0]
        # Every token is a batch row of its own, since rope takes one offset a row.
        queries = self.q_proj(x).reshape(num_tokens, self.n_heads, 1, -1)
        keys = self.k_proj(x).reshape(num_tokens, self.n_kv_heads, 1, -1)
        values = self.v_proj(x).reshape(num_tokens, self.n_kv_heads, -1)

        # A launch each: for one they would have to lie side by side, which takes two copies, or a
        # product of both, whose weights would have other names than mlx-lm's.
        queries = self.rope(queries, offset=cache.positions).squeeze(2)
        keys = self.rope(keys, offset=cache.positions).squeeze(2)

        output = cache.attend(self.layer, queries, keys, values, self.scale, self.window)
        return self.o_proj(output.reshape(num_tokens, -1))


class MLP(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        dim, hidden_dim = args.hidden_size, args.intermediate_size
        self.gate_proj = nn.Linear(dim, hidden_dim, bias=args.has_mlp_bias)
        self.down_proj = nn.Linear(hidden_dim, dim, bias=args.has_mlp_bias)
        self.up_proj = nn.Linear(dim, hidden_dim, bias=args.has_mlp_bias)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class TransformerBlock(nn.Module):
    def __init__(self, args: ModelArgs, layer: int):
        super().__init__()
        self.self_attn = Attention(args, layer)
        self.mlp = MLP(args)
        self.input_layernorm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)

    def __call__(self, x: mx.array, cache) -> mx.array:
        h = x + self.self_attn(self.input_layernorm(x), cache)
        return h + self.mlp(self.post_attention_layernorm(h))


class Qwen2Model(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)
        self.layers = [TransformerBlock(args, layer) for layer in range(args.num_hidden_layers)]
        self.norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)

    def __call__(self, tokens: mx.array, cache) -> mx.array:
        h = self.embed_tokens(tokens)
        for layer in self.layers:
            h = layer(h, cache)
        return self.norm(h)


class Model(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.args = args
        self.model_type = args.model_type
        self.model = Qwen2Model(args)
        if not args.tie_word_embeddings:
            self.lm_head = nn.Linear(args.hidden_size, args.vocab_size, bias=False)

    def __call__(self, tokens: mx.array, cache, rows: mx.array | None = None) -> mx.array:
        """Logits of the tokens of one flat batch.

        Args:
            tokens: token ids of every scheduled sequence, one after the other, [N].
            cache: gives `positions` [N] and `attend(layer, queries, keys, values, scale, window)`.
            rows: indices of the tokens whose logits are wanted, [R]; all of them if None.

        Returns:
            [R, vocab_size], or [N, vocab_size].
        """
        out = self.model(tokens, cache)
        if rows is not None:
            out = out[rows]
        if self.args.tie_word_embeddings:
            return self.model.embed_tokens.as_linear(out)
        return self.lm_head(out)

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Drop what checkpoints carry and the model doesn't use."""
        if self.args.tie_word_embeddings:
            weights.pop("lm_head.weight", None)
        return {k: v for k, v in weights.items() if "self_attn.rotary_emb.inv_freq" not in k}

    @property
    def layers(self) -> list[TransformerBlock]:
        return self.model.layers
