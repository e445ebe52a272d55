"""The commands of a chat: lines that begin with a slash."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from mlx_paged.cli.arguments import Parser, add_sampling
from mlx_paged.cli.conversation import Conversation

PARAMS = ("max_tokens", "temp", "top_p", "top_k", "min_p", "seed")

HELP = """\
/retry              ask the last question again
/clear              forget the conversation; the system message stays
/system [TEXT|off]  show, set or remove the system message
/params [NAME=VALUE ...]
                    show or change {params}
/save FILE          keep the conversation, as JSON
/load FILE          go on with a kept one
/quit               leave, as Ctrl-D does
A line that ends with a backslash goes on in the next; //text says /text.
Ctrl-C stops an answer. At the prompt, or while nothing answers, a second one leaves."""


class Quit(Exception):
    """The person has had enough."""


class Commands:
    """What a line with a slash does to the conversation and to the settings.

    Args:
        settings: the command line's, whose sampling parameters /params changes.
        say: shows a person a text that is no part of the conversation.
    """

    def __init__(
        self,
        conversation: Conversation,
        settings: argparse.Namespace,
        say: Callable[[str], None],
    ) -> None:
        self._conversation = conversation
        self._settings = settings
        self._say = say
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": self._help,
            "/retry": self._retry,
            "/clear": self._clear,
            "/system": self._system,
            "/params": self._params,
            "/save": self._save,
            "/load": self._load,
            "/quit": self._quit,
            "/exit": self._quit,
        }

    def run(self, line: str) -> bool:
        """Does what the line says, and returns whether the last question is to be answered.

        Raises ValueError, a sentence, if it can't, and Quit at the end.
        """
        name, _, rest = line.partition(" ")
        command = self._commands.get(name)
        if command is None:
            raise ValueError(f"there is no command {name}; /help lists them")
        command(rest.strip())
        return name == "/retry"

    def _help(self, rest: str) -> None:
        names = ", ".join(name.replace("_", "-") for name in PARAMS)
        self._say(HELP.format(params=names))

    def _retry(self, rest: str) -> None:
        self._conversation.ask_again()

    def _clear(self, rest: str) -> None:
        self._conversation.clear()
        self._say("the conversation is forgotten")

    def _system(self, rest: str) -> None:
        if rest:
            self._conversation.system = None if rest == "off" else rest
        self._say(f"system message: {self._conversation.system or 'none of yours'}")

    def _params(self, rest: str) -> None:
        try:
            words = shlex.split(rest)
        except ValueError as error:
            raise ValueError(f"{rest} can't be read: {error}") from error
        options: list[str] = []
        for word in words:
            name, equals, value = word.partition("=")
            if not equals:
                raise ValueError(f"{word} is not of the form NAME=VALUE, as in temp=0.7")
            options.append(f"--{name.replace('_', '-')}={value}")
        parser = _SentenceParser(prog="/params", add_help=False)
        add_sampling(parser)
        known = {name: getattr(self._settings, name) for name in PARAMS}
        # Parsed into a copy, so that a wrong one leaves all as they are.
        changed = parser.parse_args(options, argparse.Namespace(**known))
        vars(self._settings).update(vars(changed))
        shown = (f"{name.replace('_', '-')}={getattr(changed, name)}" for name in PARAMS)
        self._say(" ".join(shown))

    def _save(self, rest: str) -> None:
        self._conversation.save(_file(rest))
        self._say(f"{len(self._conversation.messages)} messages are in {rest}")

    def _load(self, rest: str) -> None:
        self._conversation.load(_file(rest))
        self._say(f"{len(self._conversation.messages)} messages from {rest}")

    def _quit(self, rest: str) -> None:
        raise Quit


class _SentenceParser(Parser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument ").replace("--", ""))


def _file(name: str) -> Path:
    if not name:
        raise ValueError("name a file")
    return Path(name).expanduser()
