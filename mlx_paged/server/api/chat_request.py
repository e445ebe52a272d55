"""The body of a request to /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, StringConstraints, model_validator

from mlx_paged.server.api.fields import (
    INT32,
    MAX_TOP_LOGPROBS,
    Body,
    SamplingFields,
    refusal,
)
from mlx_paged.server.api.messages import Message

MAX_TOOLS = 128
Name = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
JsonObject = dict[str, Any]


class Function(Body):
    """A function that the model may call."""

    name: Name
    description: str | None = None
    parameters: JsonObject | None = Field(
        default=None, description="A JSON Schema of its arguments; none by default."
    )
    strict: bool | None = Field(
        default=None, description="Ignored: a call that is required always follows the schema."
    )


class Tool(Body):
    """A tool that the model may use."""

    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    """The name of a function."""

    name: str


class NamedTool(Body):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Body):
    """What an answer must look like."""

    name: Name
    description: str | None = None
    schema_: JsonObject | None = Field(
        default=None, alias="schema", description="A JSON Schema; any object by default."
    )
    strict: bool | None = Field(
        default=None, description="Ignored: an answer always follows the schema."
    )


class TextFormat(Body):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Body):
    """Some JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(Body):
    """JSON that a schema describes."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]
ToolChoice = Literal["none", "auto", "required"] | NamedTool


class ChatRequest(SamplingFields):
    """A chat to go on from."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 32}]
        }
    )
    refused: ClassVar[dict[str, str]] = {
        "audio": "the model writes text alone",
        "function_call": "use tool_choice",
        "functions": "use tools",
        "moderation": "the server moderates nothing",
        "verbosity": "say in a message how long the answer should be",
        "web_search_options": "the server searches nothing",
    }

    messages: list[Message] = Field(min_length=1, description="The chat so far, oldest first.")
    max_completion_tokens: int | None = Field(
        default=None,
        ge=1,
        le=INT32,
        description="The newer name of `max_tokens`; what context and pool allow by default.",
    )
    modalities: list[Literal["text"]] | None = Field(
        default=None, description="The model writes text alone."
    )
    logprobs: bool | None = Field(
        default=None, description="Report the log-probabilities of the chosen tokens."
    )
    top_logprobs: int | None = Field(
        default=None,
        ge=0,
        le=MAX_TOP_LOGPROBS,
        description="And of this many of the most likely ones; needs `logprobs`.",
    )
    response_format: ResponseFormat | None = Field(
        default=None, description="What the answer must look like."
    )
    tools: list[Tool] | None = Field(
        default=None, max_length=MAX_TOOLS, description="Functions that the model may call."
    )
    tool_choice: ToolChoice | None = Field(
        default=None,
        description="Whether the model must call a tool, and which; `auto` if there are any.",
    )
    parallel_tool_calls: bool | None = Field(
        default=None, description="Whether one answer may hold several calls; true by default."
    )
    reasoning_effort: str | None = Field(
        default=None, max_length=32, description="Passed to the model's chat template."
    )
    chat_template_kwargs: JsonObject | None = Field(
        default=None,
        description="Variables for the model's chat template, such as `enable_thinking`. "
        "Not in OpenAI's API.",
    )

    @model_validator(mode="after")
    def _check_agreement(self) -> ChatRequest:
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise refusal(
                "max_tokens and max_completion_tokens differ; send one of them.", "max_tokens"
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise refusal("top_logprobs needs logprobs to be true.", "top_logprobs")
        names = [tool.function.name for tool in self.tools or ()]
        if len(names) > len(set(names)):
            raise refusal("two tools have the same name.", "tools")
        if self.tool_choice not in (None, "none", "auto") and not names:
            raise refusal("tool_choice needs tools.", "tool_choice")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise refusal(
                f"tool_choice names {self.tool_choice.function.name!r}, which is none of the "
                "tools.",
                "tool_choice",
            )
        return self

    @property
    def forced_tools(self) -> list[Function]:
        """The functions of which the answer must call one; none if it need not."""
        functions = [tool.function for tool in self.tools or ()]
        if isinstance(self.tool_choice, NamedTool):
            return [f for f in functions if f.name == self.tool_choice.function.name]
        return functions if self.tool_choice == "required" else []

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the model is told of."""
        return [] if self.tool_choice == "none" else self.tools or []
