"""Llama and what shares its architecture (SmolLM2): Qwen2 with other biases and head sizes."""

from dataclasses import dataclass

from mlx_paged.models import qwen2


@dataclass
class ModelArgs(qwen2.ModelArgs):
    num_key_value_heads: int = 0  # as many as there are heads
    max_position_embeddings: int = 2048
    rope_theta: float = 10000
    head_dim: int | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.num_key_value_heads = self.num_key_value_heads or self.num_attention_heads

    @property
    def attention_head_dim(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def has_qkv_bias(self) -> bool:
        return self.attention_bias

    @property
    def has_output_bias(self) -> bool:
        return self.attention_bias

    @property
    def has_mlp_bias(self) -> bool:
        return self.mlp_bias

    @property
    def attention_types(self) -> list[str]:
        return self.layer_types or [qwen2.FULL] * self.num_hidden_layers


class Model(qwen2.Model):
    pass
