"""Answers that follow a grammar: which tokens may come next, from llguidance."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


class GrammarState:
    """How far an answer has come in its grammar.

    Args:
        matcher: an `llguidance.LLMatcher`.
        vocab_size: of the model's logits.
    """

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def copy(self) -> GrammarState:
        """For another sample."""
        return GrammarState(self._matcher.deep_copy(), self._vocab_size)

    def add(self, token_id: int) -> bool:
        """Go on past a token. False if the grammar has become too complex to follow."""
        return bool(self._matcher.consume_token(token_id))

    def allowed(self) -> npt.NDArray[np.bool_]:
        """The tokens that may come next, [vocab_size]; an end token where the answer may end."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, count=self._vocab_size, bitorder="little")
        return allowed.view(np.bool_)


class GrammarCompiler:
    """Compiles grammars for one tokenizer.

    Args:
        tokenizer: mlx-lm's, over a fast tokenizer of transformers.
        vocab_size: of the model's logits, which may be more than the tokenizer's tokens.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        try:
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise ValueError(
                "answers that follow a grammar need llguidance; install mlx-paged[server]"
            ) from error
        end_token_ids = sorted(tokenizer.eos_token_ids)
        self._tokenizer = from_tokenizer(tokenizer._tokenizer, vocab_size, end_token_ids)
        self._vocab_size = vocab_size

    def compile(self, grammar: str) -> GrammarState:
        """The beginning of an answer that follows `grammar`.

        Raises:
            ValueError: it is no grammar that llguidance can follow.
        """
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(f"the grammar can't be followed: {_first_line(matcher.get_error())}")
        return GrammarState(matcher, self._vocab_size)


def json_schema_grammar(schema: dict[str, Any] | str) -> str:
    """A grammar for `SamplingParams.grammar`: JSON that is valid by a JSON Schema."""
    from llguidance import LLMatcher

    return str(LLMatcher.grammar_from_json_schema(schema))


def _first_line(text: str, limit: int = 300) -> str:
    line = text.strip().partition("\n")[0]
    return line if len(line) <= limit else f"{line[:limit]} ..."
