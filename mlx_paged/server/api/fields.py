"""Fields that chat and text completion requests have in common."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

INT32 = 2**31 - 1
INT64 = 2**63 - 1
MAX_SAMPLES = 128
MAX_STOP_STRINGS = 32
MAX_STOP_LENGTH = 256
MAX_TOP_LOGPROBS = 20

StopString = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_LENGTH)]
_STOP_STRING = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}
StopStrings = Annotated[
    list[StopString],
    Field(max_length=MAX_STOP_STRINGS),
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    WithJsonSchema(
        {
            "anyOf": [
                _STOP_STRING,
                {"type": "array", "items": _STOP_STRING, "maxItems": MAX_STOP_STRINGS},
            ]
        }
    ),
]
LogitBias = Annotated[
    dict[
        Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")],
        Annotated[float, Field(ge=-100, le=100)],
    ],
    WithJsonSchema(
        {
            "type": "object",
            "patternProperties": {
                "^[0-9]{1,9}$": {"type": "number", "minimum": -100, "maximum": 100}
            },
            "additionalProperties": False,
        }
    ),
]


def whole(value: Any) -> Any:
    """A number without a fraction as an integer; JSON knows but one kind of number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def refusal(message: str, param: str | None = None) -> PydanticCustomError:
    """A validation error that says `message`, about the field `param`."""
    return PydanticCustomError("refused", "{message}", {"message": message, "param": param})


TokenId = Annotated[int, Field(ge=0, le=INT32), BeforeValidator(whole)]


class Body(BaseModel):
    """A request's body. Fields that aren't known are refused, as OpenAI's API does.

    Attributes:
        ignored: fields of OpenAI's that can't change the answer here.
        refused: fields of OpenAI's that would change the answer and aren't supported, each with
            a way out. A null is as good as absence.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    ignored: ClassVar[frozenset[str]] = frozenset()
    refused: ClassVar[dict[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _read(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, way_out in cls.refused.items():
            if data.get(name) is not None:
                raise refusal(f"{name} is not supported; {way_out}.", name)
        dropped = cls.ignored | cls.refused.keys()
        return {name: whole(value) for name, value in data.items() if name not in dropped}


class StreamOptions(Body):
    """How to stream."""

    ignored: ClassVar[frozenset[str]] = frozenset({"include_obfuscation"})

    include_usage: bool | None = Field(
        default=None, description="Send one more chunk at the end, with the usage and no choices."
    )


class SamplingFields(Body):
    """How tokens are chosen, and when an answer ends."""

    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            "metadata",
            "prediction",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "safety_identifier",
            "service_tier",
            "store",
        }
    )

    model: str | None = Field(
        default=None,
        max_length=1000,
        description="The served model's name, or its last path part; may be left out.",
    )
    frequency_penalty: float | None = Field(
        default=None,
        ge=-2,
        le=2,
        description="Taken off a token's logit once for each time that the answer has it.",
    )
    logit_bias: LogitBias | None = Field(
        default=None,
        description="Added to logits, by token id.",
        examples=[{"50": -100}],
    )
    max_tokens: int | None = Field(
        default=None, ge=1, le=INT32, description="Length of an answer, in tokens, at most."
    )
    n: int | None = Field(
        default=None, ge=1, le=MAX_SAMPLES, description="Answers to each prompt; 1 by default."
    )
    presence_penalty: float | None = Field(
        default=None, ge=-2, le=2, description="Taken off the logits of the answer's tokens."
    )
    seed: int | None = Field(
        default=None,
        ge=-INT64,
        le=INT64,
        description="The same seed gives the same answer, whatever else the server does.",
    )
    stop: StopStrings | None = Field(
        default=None,
        description="Strings that end an answer; they are not part of it.",
        examples=["\n", ["User:", "###"]],
    )
    stream: bool | None = Field(
        default=None, description="Send the answer as it comes, in server-sent events."
    )
    stream_options: StreamOptions | None = Field(
        default=None, description="Only together with `stream`."
    )
    temperature: float | None = Field(
        default=None, ge=0, le=2, description="0 takes the likeliest token; 1 by default."
    )
    top_p: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Keep the fewest most likely tokens that reach this probability.",
    )
    user: str | None = Field(default=None, max_length=1000, description="Ignored.")
    priority: int | None = Field(
        default=None,
        ge=-INT32,
        le=INT32,
        description="A lower number goes first, if the server runs with the policy `priority`. "
        "Not in OpenAI's API.",
    )
    cache_salt: str | None = Field(
        default=None,
        max_length=256,
        description="Only requests of one salt share cached prefixes. Not in OpenAI's API.",
    )
    top_k: int | None = Field(
        default=None,
        ge=0,
        le=INT32,
        description="Keep the k most likely tokens; 0 keeps all. Not in OpenAI's API.",
    )
    min_p: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Drop tokens less likely than this share of the likeliest one's "
        "probability. Not in OpenAI's API.",
    )
    repetition_penalty: float | None = Field(
        default=None,
        gt=0,
        le=100,
        description="Divides positive logits, multiplies negative ones, of tokens in prompt and "
        "answer. Not in OpenAI's API.",
    )
    min_tokens: int | None = Field(
        default=None,
        ge=0,
        le=INT32,
        description="Until then nothing but the greatest length ends an answer. "
        "Not in OpenAI's API.",
    )
    ignore_eos: bool | None = Field(
        default=None, description="Go on past the model's end tokens. Not in OpenAI's API."
    )
    stop_token_ids: list[TokenId] | None = Field(
        default=None,
        max_length=64,
        description="Tokens that end an answer, besides the model's own. Not in OpenAI's API.",
    )

    @model_validator(mode="after")
    def _check_stream_options(self) -> SamplingFields:
        if self.stream_options is not None and not self.stream:
            raise refusal("stream_options needs stream to be true.", "stream_options")
        return self

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)
