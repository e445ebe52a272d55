"""Runs the command line on a model that answers at once: python fake_llm.py generate ...

Its answer is NUM_TOKENS tokens, "word0 word1 ...", SECONDS_PER_TOKEN apart. The model's name
chooses how it misbehaves: "broken", "bug", "large", "slow" (loads for a minute), "computing" (in
C, for ever).
"""

import ctypes
import os
import sys
import time
import types
from dataclasses import dataclass

SECONDS_PER_TOKEN = float(os.environ.get("SECONDS_PER_TOKEN", "0"))
NUM_TOKENS = int(os.environ.get("NUM_TOKENS", "30"))


@dataclass
class SamplingParams:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 256
    n: int = 1


@dataclass
class Delta:
    text: str
    token_ids: list
    finish_reason: str | None


class Tokenizer:
    has_chat_template = True

    def encode(self, text):
        return list(text.encode())

    def apply_chat_template(self, messages, add_generation_prompt):
        text = "".join(f"[{m['role']}]{m['content']}" for m in messages)
        return self.encode(text + "[assistant]")


def never_return_from_c():
    """Waits for a mutex that this thread holds; signals don't end that."""
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(256)
    libc.pthread_mutex_init(mutex, None)
    libc.pthread_mutex_lock(mutex)
    os.write(1, b"loading\n")
    libc.pthread_mutex_lock(mutex)


class LLM:
    def __init__(self, model, dtype, block_size, num_blocks, kv_memory, attention, **kv_format):
        if model == "broken":
            raise ValueError("there is no folder broken")
        if model == "bug":
            raise TypeError("a mistake of ours")
        if model == "large":
            raise RuntimeError("[metal::malloc] Attempting to allocate 99 bytes")
        if model == "slow":
            os.write(1, b"loading\n")
            time.sleep(60)
        if model == "computing":
            never_return_from_c()
        self.tokenizer = Tokenizer()
        self.loaded = types.SimpleNamespace(description=f"{model}: fake, {dtype}")
        self.block_size, self.num_blocks, self.attention = block_size, num_blocks or 100, "gather"
        self.kv_memory, self.kv_format = kv_memory, kv_format

    def stats(self):
        return types.SimpleNamespace(
            counts=types.SimpleNamespace(max_blocks_used=5),
            prefix=types.SimpleNamespace(num_saved_tokens=0),
        )

    def generate(self, prompts, params, progress):
        return [
            types.SimpleNamespace(
                prompt_token_ids=prompt,
                outputs=[
                    types.SimpleNamespace(
                        index=i,
                        text=f"answer {i} to {bytes(prompt).decode()}",
                        token_ids=[1, 2, 3],
                        finish_reason="stop",
                    )
                    for i in range(params.n)
                ],
            )
            for prompt in prompts
        ]

    def stream(self, prompt, params, progress=None):
        if os.environ.get("SHOW_PROMPT"):
            shown = f"kv_memory={self.kv_memory} {self.kv_format}"
            print(bytes(prompt).decode(), params, shown, file=sys.stderr)
        progress(len(prompt), len(prompt))
        for i in range(min(NUM_TOKENS, params.max_tokens)):
            time.sleep(SECONDS_PER_TOKEN)
            last = i + 1 in (NUM_TOKENS, params.max_tokens)
            reason = ("stop" if i + 1 == NUM_TOKENS else "length") if last else None
            yield Delta(f"word{i} ", [i], reason)


if __name__ == "__main__":
    module = types.ModuleType("mlx_paged.llm")
    module.LLM, module.SamplingParams = LLM, SamplingParams
    sys.modules["mlx_paged.llm"] = module
    from mlx_paged.cli import main

    sys.exit(main())
