"""Text of an answer as its tokens come: whole characters, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

INCOMPLETE = "\ufffd"


class TextStream:
    """Turns one answer's tokens into text.

    What could be the beginning of a stop string is held back until it is known not to be.

    Args:
        detokenizer: an mlx-lm streaming detokenizer of its own, with nothing in it.
        stop: strings that end the answer.
        include_stop: whether the stop string is part of the text.
        first_token_id: a token put before the answer's, and its text taken off again.
            Detokenizers drop a space at the beginning of a text, which an answer isn't.
    """

    def __init__(
        self,
        detokenizer: Any,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        first_token_id: int | None = None,
    ) -> None:
        self._detokenizer = detokenizer
        self._stop = stop
        self._include_stop = include_stop
        self._num_held = 0
        self._num_taken = 0
        self.text = ""
        self.stop_string: str | None = None
        if first_token_id is not None:
            detokenizer.add_token(first_token_id)
            _ = detokenizer.last_segment

    def add(self, token_id: int, may_stop: bool = True) -> str | None:
        """Take over a token. Returns the stop string that it completes, if any."""
        self._detokenizer.add_token(token_id)
        self._extend(self._detokenizer.last_segment, may_stop)
        return self.stop_string

    def finish(self) -> None:
        """The answer is over: what was held back is text. A half character never is."""
        if self.stop_string is None:
            self._detokenizer.finalize()
            self._extend(self._detokenizer.last_segment.rstrip(INCOMPLETE), may_stop=True)
        self._num_held = 0

    def take(self) -> str:
        """Text that is certain and has not been taken yet."""
        end = len(self.text) - self._num_held
        text = self.text[self._num_taken : end]
        self._num_taken = end
        return text

    def _extend(self, segment: str, may_stop: bool) -> None:
        if not segment:
            return
        num_before = len(self.text)
        self.text += segment
        if may_stop and self._stop:
            found = [
                (start, stop)
                for stop in self._stop
                if (start := self.text.find(stop, max(0, num_before - len(stop) + 1))) >= 0
            ]
            if found:
                start, self.stop_string = min(found)
                end = start + len(self.stop_string) if self._include_stop else start
                self.text, self._num_held = self.text[:end], 0
                return
        self._num_held = max((overlap(self.text, stop) for stop in self._stop), default=0)


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of the text that is a beginning of the mark, but not all of it."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0


def first_token_id(tokenizer: Any) -> int | None:
    """What to put before an answer's tokens, so that the first one keeps its space."""
    token_ids = tokenizer.encode("a", add_special_tokens=False)
    return int(token_ids[-1]) if token_ids else None
