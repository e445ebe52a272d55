"""Loading: the same logits as mlx-lm from the same folder, and errors that name the fault."""

import json
import shutil

import mlx.core as mx
import mlx_lm
import pytest
from tiny_models import (
    mlx_lm_logits,
    our_logits,
    quantize,
    tiny_config,
    tiny_model,
    write_checkpoint,
    write_tokenizer,
)

from mlx_paged import loader
from mlx_paged.loader import DTYPES, ModelError, load, plan
from mlx_paged.weights.precision import Precision, Quantization

TOKEN_IDS = [7, 200, 3, 3, 99, 255, 0, 42, 17]


def largest_difference(a, b):
    assert a.shape == b.shape
    return mx.abs(a - b).max().item()


def assert_same_logits(path, tolerance=1e-4, dtype=None):
    loaded = load(path, dtype)
    reference, _ = mlx_lm.load(str(path))
    expected = mlx_lm_logits(reference, TOKEN_IDS)
    assert expected.abs().max().item() > 0.5, "the random model says nothing"
    assert largest_difference(our_logits(loaded.model, TOKEN_IDS), expected) < tolerance
    return loaded


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(loader, "uses_gpu", lambda: False)


@pytest.fixture
def on_gpu(monkeypatch):
    """The decisions of a machine with a GPU; the arithmetic stays where it is."""
    monkeypatch.setattr(loader, "uses_gpu", lambda: True)


# -- the same model as mlx-lm loads


@pytest.mark.parametrize("model_type", ["qwen2", "llama"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_float32_logits_equal_those_of_mlx_lm(tmp_path, model_type, tied, num_shards):
    config = tiny_config(model_type, tie_word_embeddings=tied)
    write_checkpoint(tmp_path, config, tiny_model(config), num_shards)
    assert_same_logits(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True, "mlp_bias": True},
        {"head_dim": 16},
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ],
    ids=["biases", "head_dim", "linear rope", "llama3 rope"],
)
def test_llama_variants_equal_mlx_lm(tmp_path, changes):
    config = tiny_config("llama", **changes)
    write_checkpoint(tmp_path, config, tiny_model(config))
    assert_same_logits(tmp_path)


@pytest.mark.parametrize(
    ("group_size", "bits"), [(32, 4), (64, 4), (128, 4), (64, 8), (32, 3), (64, 6), (128, 2)]
)
def test_quantised_weights_equal_mlx_lm_whether_kept_or_dequantised(
    tmp_path, group_size, bits, on_cpu
):
    config = tiny_config()
    model = tiny_model(config)
    config = quantize(model, config, group_size, bits)
    write_checkpoint(tmp_path, config, model)

    loaded = assert_same_logits(tmp_path)
    assert loaded.precision == Precision(mx.float32)
    assert loaded.stored == Precision(mx.float32, (Quantization(bits, group_size, "affine"),))

    loaded = assert_same_logits(tmp_path, dtype="stored")
    assert loaded.precision == loaded.stored


def test_layers_may_be_quantised_differently_or_not_at_all(tmp_path, on_cpu):
    config = tiny_config(tie_word_embeddings=False)
    model = tiny_model(config)
    overrides = {
        "model.embed_tokens": {"group_size": 32, "bits": 8},
        "model.layers.1.mlp.down_proj": {"group_size": 128, "bits": 6},
        "model.layers.0.self_attn.q_proj": False,
    }
    config = quantize(model, config, 64, 4, overrides)
    write_checkpoint(tmp_path, config, model)

    loaded = assert_same_logits(tmp_path)
    assert loaded.precision.quantization == ()
    assert loaded.stored.quantization[0] == Quantization(4, 64, "affine")
    assert set(loaded.stored.quantization[1:]) == {
        Quantization(8, 32, "affine"),
        Quantization(6, 128, "affine"),
    }
    assert_same_logits(tmp_path, dtype="stored")


def test_a_hub_id_loads_what_the_hub_client_has_cached(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--somebody--tiny-4bit"
    config = tiny_config()
    write_checkpoint(repository / "snapshots" / "abc123", config, tiny_model(config))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc123")
    loaded = load("somebody/tiny-4bit")
    assert loaded.name == "somebody/tiny-4bit"
    assert loaded.path.name == "abc123"


# -- precision


@pytest.mark.parametrize("stored", [mx.float16, mx.bfloat16], ids=str)
def test_a_cpu_computes_in_float32(tmp_path, stored, on_cpu):
    config = tiny_config()
    write_checkpoint(tmp_path, config, tiny_model(config, stored))
    loaded = load(tmp_path)
    assert loaded.dtype == mx.float32
    assert loaded.stored.dtype == stored
    reference, _ = mlx_lm.load(str(tmp_path))
    reference.apply(lambda a: a.astype(mx.float32))
    difference = largest_difference(
        our_logits(loaded.model, TOKEN_IDS), mlx_lm_logits(reference, TOKEN_IDS)
    )
    assert difference < 1e-4


def test_a_gpu_keeps_what_is_stored(tmp_path, on_gpu):
    config = tiny_config()
    model = tiny_model(config, mx.bfloat16)
    config = quantize(model, config, 32, 4)
    write_checkpoint(tmp_path, config, model)
    loaded = load(tmp_path)
    assert loaded.precision == Precision(mx.bfloat16, (Quantization(4, 32, "affine"),))
    assert loaded.precision == loaded.stored


def test_a_named_dtype_keeps_quantisation_on_a_gpu_only(tmp_path, monkeypatch):
    config = tiny_config()
    model = tiny_model(config, mx.bfloat16)
    config = quantize(model, config, 32, 4)
    write_checkpoint(tmp_path, config, model)
    monkeypatch.setattr(loader, "uses_gpu", lambda: True)
    assert load(tmp_path, "float16").precision == Precision(
        mx.float16, (Quantization(4, 32, "affine"),)
    )
    monkeypatch.setattr(loader, "uses_gpu", lambda: False)
    assert load(tmp_path, "float16").precision == Precision(mx.float16)


def test_dequantised_weights_are_not_rounded_to_the_stored_dtype(tmp_path, on_cpu):
    config = tiny_config()
    model = tiny_model(config, mx.float16)
    config = quantize(model, config, 32, 4)
    write_checkpoint(tmp_path, config, model)
    packed = model.model.layers[0].mlp.up_proj
    codes = (packed.weight[..., None] >> (mx.arange(8, dtype=mx.uint32) * 4)) & 15
    codes = codes.reshape(256, 4, 32).astype(mx.float32)
    exact = codes * packed.scales[..., None].astype(mx.float32)
    exact = (exact + packed.biases[..., None].astype(mx.float32)).reshape(256, 128)
    weight = load(tmp_path).model.model.layers[0].mlp.up_proj.weight
    assert largest_difference(weight, exact) < 1e-6
    assert largest_difference(exact.astype(mx.float16).astype(mx.float32), exact) > 1e-5


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_plan_foretells_precision_and_memory(tmp_path, monkeypatch, gpu, dtype):
    monkeypatch.setattr(loader, "uses_gpu", lambda: gpu)
    config = tiny_config(tie_word_embeddings=False)
    model = tiny_model(config, mx.bfloat16)
    config = quantize(model, config, 64, 3, {"lm_head": False})
    write_checkpoint(tmp_path, config, model)
    planned, loaded = plan(tmp_path, dtype), load(tmp_path, dtype)
    assert planned.precision == loaded.precision
    assert planned.stored == loaded.stored
    assert planned.nbytes == loaded.nbytes


def test_planning_reads_no_weights(smollm2_path):
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    assert plan(smollm2_path, "float32").nbytes > 500e6
    assert mx.get_peak_memory() - before < 1e6


def test_the_description_names_what_is_in_memory_and_what_is_stored(tmp_path, on_cpu):
    config = tiny_config()
    model = tiny_model(config, mx.float16)
    config = quantize(model, config, 32, 4)
    write_checkpoint(tmp_path / "tiny", config, model)
    description = load(tmp_path / "tiny").description
    assert "qwen2, float32 (stored: float16, 4-bit in groups of 32)" in description


def test_loading_the_demo_never_holds_a_second_copy(smollm2_path, on_cpu):
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    loaded = load(smollm2_path)
    assert mx.get_peak_memory() - before < 1.1 * loaded.nbytes


def test_stop_tokens_come_from_the_configuration(tmp_path):
    config = tiny_config(eos_token_id=[256, 3])
    write_checkpoint(tmp_path, config, tiny_model(config))
    loaded = load(tmp_path)
    assert loaded.tokenizer.eos_token_ids == {256, 3}
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("Grüße 12")) == "Grüße 12"


# -- errors


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    config = tiny_config()
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), config, tiny_model(config))


@pytest.fixture
def broken(checkpoint, tmp_path):
    """A copy of a good checkpoint, to be broken."""
    return shutil.copytree(checkpoint, tmp_path / "broken")


def change_config(path, **changes):
    config = json.loads((path / "config.json").read_text())
    config.update(changes)
    config = {key: value for key, value in config.items() if value is not ...}
    (path / "config.json").write_text(json.dumps(config))


def change_weights(path, change):
    weights = mx.load(str(path / "model.safetensors"))
    change(weights)
    mx.eval(weights)
    mx.save_safetensors(str(path / "new.safetensors"), weights)
    (path / "new.safetensors").rename(path / "model.safetensors")


def error_of(model, **kwargs):
    with pytest.raises(ModelError) as raised:
        load(model, **kwargs)
    return str(raised.value)


def test_the_good_copy_loads(broken):
    load(broken)


def test_a_missing_folder_is_named_with_the_ways_out(tmp_path):
    message = error_of(tmp_path / "nowhere")
    assert str(tmp_path / "nowhere") in message
    assert "smollm2" in message
    assert "mlx_lm.convert" in message


def test_an_unreachable_hub_id_is_named():
    message = error_of("somebody/some-model-4bit")
    assert "somebody/some-model-4bit" in message
    assert "hub" in message


def test_a_file_instead_of_a_folder(broken):
    assert "is a file" in error_of(broken / "config.json")


def test_an_unsupported_model_type_lists_the_supported_ones(broken):
    change_config(broken, model_type="mamba")
    message = error_of(broken)
    assert "'mamba'" in message
    assert "qwen2, llama" in message


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_type": ...}, ["model_type None"]),
        ({"hidden_size": ...}, ["hidden_size", "missing"]),
        ({"hidden_size": "128"}, ["hidden_size", "'128'", "int"]),
        ({"num_hidden_layers": 2.5}, ["num_hidden_layers", "2.5", "int"]),
        ({"rms_norm_eps": True}, ["rms_norm_eps", "True", "float"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers is 0", "at least 1"]),
        ({"num_attention_heads": -4}, ["num_attention_heads is -4"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads (4)", "num_key_value_heads (3)"]),
        ({"hidden_size": 130}, ["hidden_size (130)", "num_attention_heads (4)"]),
        ({"rope_scaling": {"type": "spiral"}}, ["spiral"]),
        ({"rope_scaling": {"type": "linear"}}, ["factor"]),
        ({"rope_scaling": "linear"}, ["rope_scaling", "'linear'"]),
        ({"quantization": 4}, ["quantization is 4"]),
        ({"quantization": {"bits": 4}}, ["group_size None"]),
        ({"quantization": {"bits": "4", "group_size": 64}}, ["bits '4'"]),
    ],
    ids=str,
)
def test_a_broken_configuration_names_the_field(broken, changes, expected):
    change_config(broken, **changes)
    message = error_of(broken)
    assert str(broken) in message
    assert [part for part in expected if part not in message] == []


@pytest.mark.parametrize("text", ["{", "[1, 2]", "", "\xff\xfe"], ids=repr)
def test_a_configuration_that_is_no_json_object_is_named(broken, text):
    (broken / "config.json").write_bytes(text.encode("latin-1"))
    assert str(broken / "config.json") in error_of(broken)


def test_a_missing_configuration(broken):
    (broken / "config.json").unlink()
    assert "config.json" in error_of(broken)


def test_a_missing_weight_is_named(broken):
    change_weights(broken, lambda weights: weights.pop("model.layers.1.self_attn.k_proj.bias"))
    assert "model.layers.1.self_attn.k_proj.bias" in error_of(broken)


def test_an_extra_weight_is_named(broken):
    change_weights(broken, lambda weights: weights.update({"model.layers.2.odd": mx.zeros(3)}))
    assert "model.layers.2.odd" in error_of(broken)


def test_a_weight_of_another_shape_is_named(broken):
    change_weights(broken, lambda weights: weights.update({"model.norm.weight": mx.zeros(3)}))
    assert "model.norm.weight" in error_of(broken)


def test_no_weights_at_all(broken):
    (broken / "model.safetensors").unlink()
    assert "no weights" in error_of(broken)


def test_weights_that_are_cut_off(broken):
    file = broken / "model.safetensors"
    size = file.stat().st_size
    with open(file, "r+b") as stream:
        stream.truncate(size - 1)
    assert f"{size - 1} of {size} bytes" in error_of(broken)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"\xff" * 64, b"\x02" + b"\0" * 7 + b"[]"])
def test_weights_that_are_not_safetensors(broken, content):
    (broken / "model.safetensors").write_bytes(content)
    assert "model.safetensors is not a safetensors file" in error_of(broken)


def test_a_missing_shard_is_named(tmp_path):
    config = tiny_config()
    write_checkpoint(tmp_path, config, tiny_model(config), num_shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    message = error_of(tmp_path)
    assert "1 of 3" in message
    assert "model-00002-of-00003.safetensors" in message


def test_a_missing_tokenizer_is_noticed_before_weights_are_read(broken, monkeypatch):
    (broken / "tokenizer.json").unlink()
    monkeypatch.setattr(loader, "_set_precision", lambda *_: pytest.fail("weights were read"))
    assert "no tokenizer" in error_of(broken)


def test_a_broken_tokenizer_is_named(broken):
    (broken / "tokenizer.json").write_text('{"model": 1}')
    message = error_of(broken)
    assert "tokenizer" in message
    assert str(broken) in message


def test_a_configuration_with_code_of_its_own_is_refused(broken):
    change_config(broken, model_file="evil.py")
    (broken / "evil.py").write_text("raise SystemExit('ran')")
    assert "evil.py" in error_of(broken)


def test_an_unknown_dtype_lists_the_known_ones(broken):
    assert "auto, stored, float32, float16, bfloat16" in error_of(broken, dtype="int8")


def test_a_tokenizer_of_another_folder_can_be_added(broken):
    (broken / "tokenizer.json").unlink()
    write_tokenizer(broken)
    load(broken)
