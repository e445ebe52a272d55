"""What a request may ask of a model and its pool."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_paged.engine.params import SamplingParams


@dataclass(frozen=True)
class Limits:
    """Refuses requests that could never run.

    Attributes:
        vocab_size: of the model's logits.
        max_model_len: tokens of prompt and answer together.
        num_pool_tokens: slots of the pool.
    """

    vocab_size: int
    max_model_len: int
    num_pool_tokens: int

    def check(self, prompt_token_ids: list[int], params: SamplingParams) -> None:
        """Raise ValueError for tokens outside the vocabulary, or none."""
        if not prompt_token_ids:
            raise ValueError("a prompt needs at least one token")
        least, most = min(prompt_token_ids), max(prompt_token_ids)
        if least < 0 or most >= self.vocab_size:
            raise ValueError(
                f"prompt tokens must be from 0 to {self.vocab_size - 1}, the model's vocabulary; "
                f"these are from {least} to {most}"
            )
        most = max(params.logit_bias, default=0)
        if most >= self.vocab_size:
            raise ValueError(
                f"logit_bias has token {most}, and the model's vocabulary ends at "
                f"{self.vocab_size - 1}"
            )

    def max_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """The most tokens of an answer: what context and pool leave, where no number is given.

        Raises:
            ValueError: the context has no room for them.
        """
        wanted = params.max_tokens or 1
        if num_prompt_tokens + wanted > self.max_model_len:
            up_to = "up to " if params.max_tokens else "at least "
            raise ValueError(
                f"{num_prompt_tokens} prompt tokens and {up_to}{wanted} new ones are more than "
                f"the model's context of {self.max_model_len}; lower max_tokens or shorten the "
                "prompt"
            )
        if params.max_tokens is not None:
            return params.max_tokens
        # The last token's K/V are never stored.
        return max(1, min(self.max_model_len, self.num_pool_tokens + 1) - num_prompt_tokens)
