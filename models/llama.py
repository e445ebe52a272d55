"""Llama and what shares its architecture (SmolLM2): Qwen2 with other biases and head sizes."""

from dataclasses import dataclass

from mlx_paged.models import qwen2


@dataclass
class ModelArgs(qwen2.ModelArgs):
    num_key_value_heads: int | None = None
    max_position_embeddings: int | None = None
    rope_theta: float = 10000
    head_dim: int | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    layer_types: list[str] | None = None

    def __post_init__(self):
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if "sliding_attention" in (self.layer_types or []):
            raise ValueError("sliding-window attention layers are not supported yet")

    @property
    def qkv_bias(self) -> bool:
        return self.attention_bias

    @property
    def o_bias(self) -> bool:
        return self.attention_bias

    @property
    def attention_head_dim(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads


class Model(qwen2.Model):
    pass
