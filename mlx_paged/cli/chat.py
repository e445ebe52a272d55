"""`mlx-paged chat`: a conversation in the terminal, or questions from a pipe, one a line."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import suppress

from mlx_paged.blocks import OutOfBlocks
from mlx_paged.cli.arguments import MAX_SEED
from mlx_paged.cli.chat_commands import Commands, Quit
from mlx_paged.cli.chat_models import Answer, ChatModel, LocalModel, RemoteModel
from mlx_paged.cli.conversation import Conversation
from mlx_paged.cli.manners import UsageError, forget_interrupt

PROMPT = "> "
CONTINUED = ". "
DEFAULT_MODEL = "smollm2"

DIM, PLAIN = "\x1b[2m", "\x1b[0m"

# What a terminal would obey rather than show, but for line ends and tabs.
CONTROL = {code: None for code in (*range(32), 127, *range(128, 160)) if chr(code) not in "\n\t"}


def run(args: argparse.Namespace) -> int:
    model = _model(args)
    if sys.stdin.isatty():
        Terminal(model, args).talk()
    else:
        Script(model, args).talk()
    return 0


def _model(args: argparse.Namespace) -> ChatModel:
    if args.url is not None:
        given = [
            name for name, default in args.local_defaults.items() if vars(args)[name] != default
        ]
        if given:
            option = given[0].replace("_", "-")
            raise UsageError(f"--{option} is of the engine here; with --url it is the server's")
        return RemoteModel(args)
    if args.api_key is not None:
        raise UsageError("--api-key is for a server, which --url names")
    args.model = args.model or DEFAULT_MODEL
    return LocalModel(args)


class Chat:
    """A conversation with a model: lines come in, answers go to stdout, all else to stderr."""

    def __init__(self, model: ChatModel, args: argparse.Namespace) -> None:
        self.model = model
        self.args = args
        self.conversation = Conversation(args.system)
        self.commands = Commands(self.conversation, args, self.say)
        self._num_answers = 0

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def take(self, line: str) -> None:
        """A question, or a command. Raises ValueError: a sentence on why it has no answer."""
        if line.startswith("/") and not line.startswith("//"):
            if not self.commands.run(line):
                return
        elif line.strip():
            self.conversation.ask(line.removeprefix("/") if line.startswith("//") else line)
        else:
            return
        self.finish(self._answer())

    def talk(self) -> None:
        raise NotImplementedError

    def _answer(self) -> Answer:
        written = ""

        def write(text: str) -> None:
            nonlocal written
            written = text or written
            self.write(text)

        messages = self.conversation.messages
        try:
            answer = self.model.answer(messages, self.args, self._seed(), write)
        except ValueError:
            if written and not written.endswith("\n"):
                self.write("\n")
            raise
        self._num_answers += 1
        if answer.text:
            self.conversation.answer(answer.text)
        if not written.endswith("\n"):
            self.write("\n")
        return answer

    def finish(self, answer: Answer) -> None:
        """Says what there is to say after an answer."""
        if self.args.stats:
            self.say(f"[{answer.stats()}]")

    def write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def _seed(self) -> int | None:
        """Another for each answer, so that asking again can give another one."""
        if self.args.seed is None:
            return None
        return (self.args.seed + self._num_answers) % (MAX_SEED + 1)


class Script(Chat):
    """Lines from a pipe or a file; the first that has no answer ends it."""

    def talk(self) -> None:
        lines = enumerate(sys.stdin.buffer, start=1)
        for number, data in lines:
            try:
                self.take(data.decode("utf-8").rstrip("\r\n"))
            except UnicodeDecodeError as error:
                raise UsageError(f"line {number} of stdin is not valid UTF-8") from error
            except Quit:
                return

    def finish(self, answer: Answer) -> None:
        super().finish(answer)
        if answer.is_stopped:
            raise KeyboardInterrupt


class Terminal(Chat):
    """A person, who may stop an answer, mend a question and go on after an error."""

    def talk(self) -> None:
        with suppress(ImportError):
            import readline  # noqa: F401  (from here on, input() edits lines and has a history)
        self.say(f"{self.model.description}\n/help lists the commands, Ctrl-D leaves.")
        while (line := self._read()) is not None:
            try:
                self.take(line)
            except Quit:
                return
            except (ValueError, OutOfBlocks) as error:
                self.say(f"{error}")

    def say(self, text: str) -> None:
        super().say(f"{DIM}{text}{PLAIN}" if _has_colours() else text)

    def write(self, text: str) -> None:
        super().write(text.translate(CONTROL) if sys.stdout.isatty() else text)

    def finish(self, answer: Answer) -> None:
        if answer.is_stopped:
            self.say("stopped; /retry asks again" if answer.text else "stopped before any text")
        elif answer.finish_reason == "length":
            limit = self.args.max_tokens
            self.say(f"cut off at the limit; /params max-tokens={2 * limit} allows more")
        super().finish(answer)

    def _read(self) -> str | None:
        """A line, or several joined by backslashes; None at the end of the input.

        The first Ctrl-C drops what has been typed, a second one leaves.
        """
        has_interrupted = False
        lines: list[str] = []
        while True:
            try:
                line = self._read_line(CONTINUED if lines else PROMPT)
                # From a terminal whose encoding isn't the locale's.
                line.encode()
            except EOFError:
                self.write("\n")
                return None
            except UnicodeEncodeError:
                self.say("that line is not valid UTF-8")
                continue
            except KeyboardInterrupt:
                if has_interrupted:
                    raise
                forget_interrupt()
                has_interrupted, lines = True, []
                self.say("\nCtrl-C again, or Ctrl-D, leaves")
                continue
            has_interrupted = False
            if not line.endswith("\\"):
                return "\n".join([*lines, line])
            lines.append(line[:-1])

    def _read_line(self, prompt: str) -> str:
        if sys.stdout.isatty():
            return input(prompt)
        # input() would put its prompt among the answers.
        print(prompt, end="", file=sys.stderr, flush=True)
        if not (line := sys.stdin.readline()):
            raise EOFError
        return line.rstrip("\n")


def _has_colours() -> bool:
    return sys.stderr.isatty() and not os.environ.get("NO_COLOR")
