"""Who answers in a chat: an engine in this process, or a server of OpenAI's API."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol
from urllib.parse import urlsplit

from mlx_paged.cli.arguments import API_KEY_VARIABLE, INSTALL_SERVER
from mlx_paged.cli.conversation import Message
from mlx_paged.cli.manners import UsageError, forget_interrupt, interrupts_kept
from mlx_paged.cli.progress import PrefillBar, waiting

KEY_VARIABLES = (API_KEY_VARIABLE, "OPENAI_API_KEY")
NO_KEY = "none"
BAD_REQUEST = 400

WAY_OUT = "/clear forgets the conversation, /params changes what is asked for"

Write = Callable[[str], None]


@dataclass
class Answer:
    """One answer, or what there was of it when it was stopped.

    Attributes:
        finish_reason: "stop", "length" or another of the server's.
        is_stopped: whether Ctrl-C ended it.
        num_cached_tokens: prompt tokens whose K and V were there already; None if not known.
        first_seconds: until the first text.
    """

    text: str = ""
    finish_reason: str | None = None
    is_stopped: bool = False
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_generated_tokens: int = 0
    first_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float | None:
        """Without the first token, which belongs to the prompt; None if it is the only one."""
        decoding = self.seconds - self.first_seconds
        if self.num_generated_tokens < 2 or decoding <= 0:
            return None
        return (self.num_generated_tokens - 1) / decoding

    def stats(self) -> str:
        """One line."""
        prompt = "" if self.num_prompt_tokens is None else f"{self.num_prompt_tokens} prompt tokens"
        if prompt and self.num_cached_tokens is not None:
            prompt += f" ({self.num_cached_tokens} cached)"
        speed = self.tokens_per_second
        generated = f"{self.num_generated_tokens} tokens"
        parts = [
            prompt,
            f"{self.first_seconds:.2f} s to the first",
            generated if speed is None else f"{generated} at {speed:.1f} tokens/s",
        ]
        return ", ".join(part for part in parts if part)


class ChatModel(Protocol):
    @property
    def description(self) -> str: ...

    def answer(
        self, messages: list[Message], args: argparse.Namespace, seed: int | None, write: Write
    ) -> Answer:
        """Writes an answer as it comes and returns it whole; Ctrl-C stops it, not the program.

        Raises ValueError: a sentence on why there is none.
        """


class _Stopped(Exception):
    pass


class LocalModel:
    """An engine in this process. Its blocks keep the conversation between the turns."""

    def __init__(self, args: argparse.Namespace) -> None:
        from mlx_paged.cli.generate import make_llm

        with waiting(f"Loading {args.model}"):
            self._llm = make_llm(args)
        if not self._llm.tokenizer.has_chat_template:
            raise ValueError(
                f"{args.model} has no chat template, so it can't chat; 'mlx-paged generate --raw' "
                "continues a text with it"
            )

    @property
    def description(self) -> str:
        return self._llm.loaded.description

    def answer(
        self, messages: list[Message], args: argparse.Namespace, seed: int | None, write: Write
    ) -> Answer:
        llm = self._llm
        prompt = list(llm.tokenizer.apply_chat_template(messages, add_generation_prompt=True))
        answer = Answer(num_prompt_tokens=len(prompt))
        num_saved = llm.stats().prefix.num_saved_tokens
        start = time.perf_counter()
        # An engine that is left in the middle of a step can't go on.
        with interrupts_kept() as is_stopped, PrefillBar(len(prompt)) as bar:

            def progress(num_prefilled: int, num_prompt_tokens: int) -> None:
                bar.update(num_prefilled, num_prompt_tokens)
                if is_stopped():
                    raise _Stopped

            try:
                for output in self._stream(prompt, args, seed, progress):
                    if not answer.num_generated_tokens:
                        bar.close()
                        answer.first_seconds = time.perf_counter() - start
                    answer.num_generated_tokens += 1
                    answer.text += output.text
                    answer.finish_reason = output.finish_reason
                    write(output.text)
                    if is_stopped():
                        raise _Stopped
            except _Stopped:
                answer.is_stopped = True
        answer.seconds = time.perf_counter() - start
        answer.num_cached_tokens = llm.stats().prefix.num_saved_tokens - num_saved
        return answer

    def _stream(
        self,
        prompt: list[int],
        args: argparse.Namespace,
        seed: int | None,
        progress: Callable[[int, int], None],
    ) -> Iterator[Any]:
        """At most `max_tokens`, and no more than context and pool have room for."""
        from mlx_paged.llm import SamplingParams

        def params(max_tokens: int | None) -> SamplingParams:
            return SamplingParams(
                temperature=args.temp,
                top_p=args.top_p,
                top_k=args.top_k,
                min_p=args.min_p,
                seed=seed,
                max_tokens=max_tokens,
            )

        try:
            return self._llm.stream(prompt, params(args.max_tokens), progress=progress)
        except ValueError:
            try:
                return self._llm.stream(prompt, params(None), progress=progress)
            except ValueError as error:
                raise ValueError(f"{error} ({WAY_OUT})") from error


class RemoteModel:
    """A model behind a server of OpenAI's API, through the client that OpenAI publishes."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._openai = _import_openai()
        self._client = self._openai.OpenAI(
            base_url=_base_url(args.url), api_key=_api_key(args.api_key), max_retries=0
        )
        self._url = args.url
        with waiting(f"Asking {args.url}"):
            self._model = args.model or self._only_model()

    @property
    def description(self) -> str:
        return f"{self._model} at {self._url}"

    def answer(
        self, messages: list[Message], args: argparse.Namespace, seed: int | None, write: Write
    ) -> Answer:
        answer = Answer()
        start = time.perf_counter()
        try:
            with self._sentences(), self._open(messages, args, seed) as stream:
                for chunk in stream:
                    text = _take(chunk, answer)
                    if text and not answer.text:
                        answer.first_seconds = time.perf_counter() - start
                    answer.text += text
                    write(text)
        except KeyboardInterrupt:
            forget_interrupt()
            answer.is_stopped = True
        if not (answer.is_stopped or answer.finish_reason):
            raise ValueError(f"{self._url} closed the connection in the middle of an answer")
        answer.seconds = time.perf_counter() - start
        return answer

    def _open(self, messages: list[Message], args: argparse.Namespace, seed: int | None) -> Any:
        # OpenAI's own server refuses fields that it doesn't know.
        ours = {"top_k": args.top_k, "min_p": args.min_p}
        optional: dict[str, Any] = {} if seed is None else {"seed": seed}
        if args.stats:
            optional["stream_options"] = {"include_usage": True}
        return self._client.chat.completions.create(
            model=self._model,
            messages=messages,
            stream=True,
            temperature=args.temp,
            top_p=args.top_p,
            max_tokens=args.max_tokens,
            extra_body={name: value for name, value in ours.items() if value},
            **optional,
        )

    def _only_model(self) -> str:
        with self._sentences():
            names = [model.id for model in self._client.models.list()]
        if len(names) != 1:
            raise ValueError(
                f"{self._url} serves {', '.join(names) or 'no model'}; name one with --model"
            )
        return names[0]

    @contextmanager
    def _sentences(self) -> Iterator[None]:
        """Turns the client's errors into ValueErrors that say what the server said."""
        openai = self._openai
        try:
            yield
        except openai.APITimeoutError as error:
            raise ValueError(f"{self._url} did not answer in time") from error
        except openai.APIConnectionError as error:
            reason = _one_line(error.__cause__ or error)
            raise ValueError(f"the connection to {self._url} failed: {reason}") from error
        except openai.AuthenticationError as error:
            raise ValueError(
                f"{self._url} wants an API key: give --api-key or set {API_KEY_VARIABLE}"
            ) from error
        except openai.APIStatusError as error:
            way_out = f" ({WAY_OUT})" if error.status_code == BAD_REQUEST else ""
            raise ValueError(
                f"{self._url} says {error.status_code}: {_message(error)}{way_out}"
            ) from error
        except openai.OpenAIError as error:
            raise ValueError(f"{self._url} failed: {_message(error)}") from error
        except ValueError as error:
            raise ValueError(
                f"what {self._url} sends is not OpenAI's API: {_one_line(error)}"
            ) from error


def _take(chunk: Any, answer: Answer) -> str:
    """Takes over a streamed chunk; returns its text."""
    if usage := getattr(chunk, "usage", None):
        answer.num_prompt_tokens = usage.prompt_tokens
        answer.num_generated_tokens = usage.completion_tokens
        details = usage.prompt_tokens_details
        answer.num_cached_tokens = details.cached_tokens if details else None
    if not chunk.choices:
        return ""
    choice = chunk.choices[0]
    answer.finish_reason = choice.finish_reason or answer.finish_reason
    text = (choice.delta and choice.delta.content) or ""
    if text and not usage:
        answer.num_generated_tokens += 1
    return text


def _import_openai() -> Any:
    try:
        return import_module("openai")
    except ImportError as error:
        raise UsageError(f"--url needs the package openai: {INSTALL_SERVER}") from error


def _base_url(url: str) -> str:
    """With the path /v1, unless another is given."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise UsageError(f"--url is {url!r}; it must begin with http:// or https:// and a host")
    return url if parts.path.strip("/") else f"{url.rstrip('/')}/v1"


def _api_key(given: str | None) -> str:
    keys = (given, *map(os.environ.get, KEY_VARIABLES))
    return next((key for key in keys if key), NO_KEY)


def _message(error: Any) -> str:
    """The sentence in an error's body, if there is one."""
    body = getattr(error, "body", None)
    found = body.get("message") if isinstance(body, dict) else body
    return _one_line(found if isinstance(found, str) and found else error)


def _one_line(error: object) -> str:
    return " ".join(str(error).split())[:500] or type(error).__name__
