"""The body of a request to /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator

from mlx_paged.server.api.fields import (
    INT32,
    MAX_SAMPLES,
    MAX_TOP_LOGPROBS,
    SamplingFields,
    refusal,
)

MAX_PROMPTS = 256
MAX_ANSWERS = 1024
DEFAULT_MAX_TOKENS = 16


def read_prompts(value: Any) -> list[str | list[int]]:
    """One or several prompts, each text or token ids, as a list."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        raise refusal("prompt must be text, token ids, or a list of those.")
    if value and all(_is_token_id(item) for item in value):
        value = [value]
    if not 1 <= len(value) <= MAX_PROMPTS:
        raise refusal(f"prompt must hold from 1 to {MAX_PROMPTS} prompts, not {len(value)}.")
    for index, prompt in enumerate(value):
        is_tokens = isinstance(prompt, list) and all(_is_token_id(item) for item in prompt)
        if not isinstance(prompt, str) and not is_tokens:
            raise refusal(f"prompt[{index}] is neither text nor a list of token ids.")
        if not prompt:
            raise refusal(f"prompt[{index}] is empty; an answer needs something to follow.")
    return value


def _is_token_id(value: Any) -> bool:
    return type(value) is int and 0 <= value <= INT32


_TEXT = {"type": "string", "minLength": 1}
_TOKEN_IDS = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": INT32},
    "minItems": 1,
}
Prompts = Annotated[
    list[str | list[int]],
    PlainValidator(read_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                _TEXT,
                {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_PROMPTS},
                _TOKEN_IDS,
                {"type": "array", "items": _TOKEN_IDS, "minItems": 1, "maxItems": MAX_PROMPTS},
            ]
        }
    ),
]


class CompletionRequest(SamplingFields):
    """Text or tokens to go on from."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}]
        }
    )
    refused: ClassVar[dict[str, str]] = {
        "suffix": "put what comes after the gap into the prompt, in the model's own format"
    }

    prompt: Prompts = Field(
        description="Text, token ids, or several of them.",
        examples=["Once upon a time", ["one prompt", "another"], [1, 2, 3], [[1, 2], [3, 4]]],
    )
    max_tokens: int | None = Field(
        default=None,
        ge=1,
        le=INT32,
        description=f"Length of an answer, in tokens, at most; {DEFAULT_MAX_TOKENS} by default.",
    )
    best_of: int | None = Field(
        default=None,
        ge=1,
        le=MAX_SAMPLES,
        description="Answers to sample; the `n` with the highest mean log-probability are given.",
    )
    echo: bool | None = Field(default=None, description="Begin each answer with its prompt.")
    logprobs: int | None = Field(
        default=None,
        ge=0,
        le=MAX_TOP_LOGPROBS,
        description="Report the log-probabilities of the chosen tokens, and of this many of the "
        "most likely ones.",
    )

    @model_validator(mode="after")
    def _check_agreement(self) -> CompletionRequest:
        n, best_of = self.n or 1, self.best_of
        if best_of is not None and best_of < n:
            raise refusal(f"best_of is {best_of}, fewer than the n = {n} to return.", "best_of")
        if best_of is not None and best_of > n and self.stream:
            raise refusal("best_of can't choose while it streams; leave out stream.", "best_of")
        if len(self.prompt) * max(n, best_of or 1) > MAX_ANSWERS:
            raise refusal(
                f"{len(self.prompt)} prompts with {max(n, best_of or 1)} answers each are more "
                f"than {MAX_ANSWERS} answers; send several requests.",
                "prompt",
            )
        if self.echo and self.logprobs is not None:
            raise refusal(
                "echo together with logprobs is not supported: log-probabilities of the prompt's "
                "tokens aren't computed. Leave out one of them.",
                "echo",
            )
        return self
