"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mlx_paged.server.api.answer import TokenLogprobs
from mlx_paged.server.api.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    TokenLogprob,
    TopLogprob,
)
from mlx_paged.server.api.vocabulary import Vocabulary

# JSON has no infinity; OpenAI's API gives this for a token that is as good as impossible.
LEAST = -9999.0


def chat_logprobs(entries: Sequence[TokenLogprobs], vocabulary: Vocabulary) -> ChatLogprobs:
    """The shape of /v1/chat/completions."""

    def shown(token_id: int, logprob: float) -> TopLogprob:
        return TopLogprob(
            token=vocabulary.token_text(token_id),
            logprob=finite(logprob),
            bytes=list(vocabulary.token_bytes(token_id)),
        )

    return ChatLogprobs(
        refusal=None,
        content=[
            TokenLogprob(
                **shown(entry.token_id, entry.logprob).model_dump(),
                top_logprobs=[shown(*pair) for pair in entry.top],
            )
            for entry in entries
        ],
    )


def completion_logprobs(
    entries: Sequence[TokenLogprobs], vocabulary: Vocabulary, offset: int = 0
) -> CompletionLogprobs:
    """The shape of /v1/completions.

    Args:
        offset: length of the text before the answer, if the prompt is part of it.
    """
    return CompletionLogprobs(
        tokens=[vocabulary.token_text(entry.token_id) for entry in entries],
        token_logprobs=[finite(entry.logprob) for entry in entries],
        top_logprobs=[
            {
                vocabulary.token_text(token_id): finite(logprob)
                for token_id, logprob in [*entry.top, (entry.token_id, entry.logprob)]
            }
            for entry in entries
        ],
        text_offset=[offset + entry.text_offset for entry in entries],
    )


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST
