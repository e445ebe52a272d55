"""A tiny random Qwen2 on the engine, and what it answers alone over mlx-lm's contiguous cache."""

import random
from functools import cache

import mlx.core as mx
from mlx_lm.generate import generate_step
from tiny_models import VOCAB_SIZE, tiny_config, tiny_model

from mlx_paged.engine.engine import Engine
from mlx_paged.engine.options import EngineOptions
from mlx_paged.engine.params import SamplingParams
from mlx_paged.models import qwen2

CONFIG = tiny_config(hidden_size=64)
GREEDY = SamplingParams(temperature=0, max_tokens=12)


@cache
def mlx_lm_model():
    return tiny_model(CONFIG)


@cache
def paged_model(dtype=mx.float32):
    model = qwen2.Model(qwen2.ModelArgs.from_dict(CONFIG))
    model.update(tiny_model(CONFIG, dtype).parameters())
    mx.eval(model.parameters())
    return model


def make_engine(tokenizer=None, **options):
    defaults = {"block_size": 4, "num_blocks": 128, "max_num_seqs": 32}
    return Engine(paged_model(), tokenizer, EngineOptions(**{**defaults, **options}))


def make_prompts(num_prompts, max_length=40, seed=0):
    rng = random.Random(seed)
    return [
        [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, max_length))]
        for _ in range(num_prompts)
    ]


def mlx_lm_answer(prompt, max_tokens):
    """Greedy, over one contiguous cache."""
    steps = generate_step(mx.array(prompt), mlx_lm_model(), max_tokens=max_tokens)
    return [int(token_id) for token_id, _ in steps]


def run(engine, prompts, params=GREEDY, **kwargs):
    """Token ids of all samples of all prompts, with every block checked after every step."""
    each = params if isinstance(params, list) else [params] * len(prompts)
    for i, (prompt, p) in enumerate(zip(prompts, each, strict=True)):
        engine.add_request(str(i), prompt, p, **kwargs)
    outputs = finish(engine)
    return [[o.token_ids for o in outputs[str(i)].outputs] for i in range(len(prompts))]


def finish(engine, max_steps=5000):
    """Step until nothing is left. Returns the finished requests by id."""
    outputs = {}
    for _ in range(max_steps):
        if not engine.has_work():
            break
        for token in engine.step():
            if token.request_output is not None:
                outputs[token.request_id] = token.request_output
        engine.check_integrity()
    assert engine.pool.blocks.num_free_blocks == engine.pool.num_blocks
    assert not engine.requests
    return outputs
