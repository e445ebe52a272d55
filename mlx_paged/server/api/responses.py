"""The bodies of answers, whole and streamed."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

FinishReason = Literal["stop", "length", "tool_calls"]


class PromptTokensDetails(BaseModel):
    """What became of the prompt's tokens."""

    cached_tokens: int = Field(description="Those whose K/V were in the pool already.")


class Usage(BaseModel):
    """Tokens of a request. A prompt counts once, however many answers it gets."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(BaseModel):
    """A token that might have come."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token of the answer."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of an answer's tokens."""

    content: list[TokenLogprob] | None
    refusal: None = None


class CompletionLogprobs(BaseModel):
    """Log-probabilities of an answer's tokens, field by field."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int] = Field(description="Where in the text each token begins.")


class FunctionCall(BaseModel):
    """A function, and its arguments as JSON."""

    name: str
    arguments: str


class ToolCallMade(BaseModel):
    """A call that the client should make."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ToolCallDelta(ToolCallMade):
    """A call in a stream; it comes whole."""

    index: int


class ChatMessage(BaseModel):
    """An answer."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCallMade] | None = None


class ChatDelta(BaseModel):
    """What came of an answer since the last chunk."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChoice(BaseModel):
    """One of the answers."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason


class ChatChunkChoice(BaseModel):
    """What came of one of the answers."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


class ChatCompletion(BaseModel):
    """Answers to a chat."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatChunk(BaseModel):
    """A part of the answers to a chat."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class CompletionChoice(BaseModel):
    """One of the answers, or what came of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None


class Completion(BaseModel):
    """Answers to prompts, or a part of them."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class ModelCard(BaseModel):
    """A model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "mlx-paged"
    max_model_len: int | None = Field(
        default=None, description="Tokens of prompt and answer together, at most."
    )


class ModelList(BaseModel):
    """The models that are served."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Health(BaseModel):
    """That a server works."""

    status: Literal["ok"] = "ok"
