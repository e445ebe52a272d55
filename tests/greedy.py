"""Greedy generation through a paged pool and through mlx-lm's contiguous cache."""

import importlib

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import _get_classes

from mlx_paged.blocks import Sequence
from mlx_paged.cache import KVPool, step


def ours_of(reference):
    """Our model with the very weights of a model of mlx-lm."""
    arch = importlib.import_module(f"mlx_paged.models.{reference.model_type}")
    model = arch.Model(arch.ModelArgs.from_dict(vars(reference.args)))
    model.load_weights(tree_flatten(reference.trainable_parameters()))
    return model


def mlx_lms_of(loaded):
    """mlx-lm's model with the very weights of a model that `load` gave."""
    model_class, args_class = _get_classes(loaded.config)
    model = model_class(args_class.from_dict(loaded.config))
    model.update(loaded.model.parameters())
    return model


def paged_greedy(model, prompts, num_tokens, block_size, chunk=None, num_blocks=None, **options):
    """Prompts take turns, so that their blocks interleave in one pool.

    Returns:
        (token ids, logits [num_tokens, vocab_size]) of each prompt.
    """
    longest = max(len(prompt) for prompt in prompts) + num_tokens
    num_blocks = num_blocks or len(prompts) * -(-longest // block_size) + 1
    pool = KVPool.for_model(model, num_blocks, block_size)
    sequences = [Sequence(pool.blocks, prompt) for prompt in prompts]
    logits = [[] for _ in prompts]
    for _ in range(num_tokens):
        for sequence, rows in zip(sequences, logits, strict=True):
            while sequence.num_cached_tokens < sequence.num_tokens:
                missing = sequence.num_tokens - sequence.num_cached_tokens
                row = step(model, pool, [sequence], [min(missing, chunk or missing)], **options)[0]
            rows.append(np.array(row.astype(mx.float32)))
            sequence.token_ids.append(int(rows[-1].argmax()))
    pool.blocks.check_integrity(sequence.block_table for sequence in sequences)
    return [
        (sequence.token_ids[len(prompt) :], np.stack(rows))
        for sequence, prompt, rows in zip(sequences, prompts, logits, strict=True)
    ]


def contiguous_greedy(model, prompt, num_tokens):
    """The same with mlx-lm's model and contiguous caches, for one prompt."""
    cache = make_prompt_cache(model)
    token_ids, logits, new = [], [], list(prompt)
    for _ in range(num_tokens):
        row = model(mx.array([new]), cache=cache)[0, -1].astype(mx.float32)
        logits.append(np.array(row))
        new = [int(logits[-1].argmax())]
        token_ids += new
    return token_ids, np.stack(logits)
