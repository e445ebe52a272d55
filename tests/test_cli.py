"""The command line, as a person meets it: text, errors, interrupts, pipes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_models import tiny_config, tiny_model, write_checkpoint

from mlx_paged.cli.arguments import build_parser
from mlx_paged.cli.prompts import read_prompts
from mlx_paged.cli.stats import Stats

REAL = [sys.executable, "-m", "mlx_paged"]
FAKE = [sys.executable, str(Path(__file__).with_name("fake_llm.py"))]
ANSWER = "".join(f"word{i} " for i in range(30))


def run(*arguments, command=FAKE, stdin=None, **variables):
    return subprocess.run(
        [*command, *map(str, arguments)],
        input=stdin,
        capture_output=True,
        env={**os.environ, **variables},
        timeout=120,
    )


def start(*arguments, command=FAKE, **variables):
    return subprocess.Popen(
        [*command, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **variables},
    )


def assert_refused(result, *parts, status=1):
    """One sentence on stderr, nothing on stdout."""
    error = result.stderr.decode()
    assert (result.returncode, result.stdout) == (status, b"")
    assert error.startswith("mlx-paged")
    assert error.count("\n") == 1
    assert [part for part in parts if part not in error] == []


# -- text


def test_only_the_text_goes_to_stdout():
    result = run("generate", "hi", "--stats")
    assert result.returncode == 0
    assert result.stdout.decode() == ANSWER + "\n"
    assert result.stderr != b""


def test_nothing_goes_to_stderr_unless_asked():
    assert run("generate", "hi").stderr == b""


def test_text_comes_as_it_is_made():
    process = start("generate", "hi", SECONDS_PER_TOKEN="0.2")
    first = os.read(process.stdout.fileno(), 1000)
    assert first == b"word0 "
    process.kill()
    process.communicate()


def test_the_chat_template_is_applied_unless_raw():
    seen = [
        run("generate", *options, "--max-tokens", "1", SHOW_PROMPT="1").stderr.decode()
        for options in (["hi"], ["hi", "--system", "Be brief."], ["hi", "--raw"])
    ]
    assert [line.partition(" Sampling")[0] for line in seen] == [
        "[user]hi[assistant]",
        "[system]Be brief.[user]hi[assistant]",
        "hi",
    ]


def test_options_reach_the_model():
    options = "--temp 0.7 --top-p 0.9 --top-k 40 --min-p 0.05 --seed 3 --max-tokens 1"
    options += " --kv-memory 0.5 --kv-bits 4 --kv-group-size 64"
    result = run("generate", "hi", *options.split(), SHOW_PROMPT="1")
    assert (
        "temperature=0.7, top_p=0.9, top_k=40, min_p=0.05, seed=3, max_tokens=1"
        in result.stderr.decode()
    )
    kv_format = {"kv_bits": 4, "kv_group_size": 64}
    assert f"kv_memory={2**29} {kv_format}" in result.stderr.decode()


def test_a_dash_reads_the_prompt_from_stdin():
    result = run("generate", "-", "--raw", stdin="zwei\nZeilen ä\n".encode(), SHOW_PROMPT="1")
    assert result.stderr.decode().startswith("zwei\nZeilen ä Sampling")


def test_a_prompt_may_begin_with_a_minus_sign():
    result = run("generate", "--raw", "--", "-5+3", SHOW_PROMPT="1")
    assert result.stderr.decode().startswith("-5+3 ")


def test_json_is_one_object_with_text_and_numbers():
    result = run("generate", "hi", "--json", "--raw", "--max-tokens", 15, "--block-size", 4)
    answer = json.loads(result.stdout)
    assert answer["text"] == "".join(f"word{i} " for i in range(15))
    assert answer["finish_reason"] == "length"
    stats = answer["stats"]
    assert (stats["num_prompt_tokens"], stats["num_generated_tokens"]) == (2, 15)
    assert (stats["num_used_blocks"], stats["slot_share"]) == (5, 16 / 20)
    assert stats["generation_tokens_per_second"] > 0


def test_text_that_the_terminal_cannot_spell_is_replaced():
    result = run("generate", "hi", "--model", "ümläut", "--stats", PYTHONIOENCODING="ascii")
    assert result.returncode == 0
    assert b"?ml?ut" in result.stderr


def test_stats_give_speeds_and_the_share_of_slots_that_hold_tokens():
    stats = Stats(
        model="m",
        attention="gather",
        num_prompt_tokens=30,
        num_generated_tokens=11,
        prompt_seconds=0.5,
        generation_seconds=2.0,
        block_size=16,
        num_blocks=100,
        num_used_blocks=3,
        peak_memory_bytes=2**30,
    )
    assert stats.slot_share == 40 / 48
    assert stats.prompt_tokens_per_second == 60
    assert stats.generation_tokens_per_second == 5


# -- several prompts


def parse(*arguments):
    return read_prompts(build_parser().parse_args(["generate", *map(str, arguments)]))


def test_a_file_holds_a_prompt_a_line_or_json_lines(tmp_path):
    file = tmp_path / "prompts"
    file.write_text('one\n\n{"prompt": "two\\nlines", "id": 7}\n  three \n')
    assert parse("--prompts-file", file) == ["one", "two\nlines", "  three "]


def test_answers_to_several_prompts_come_in_their_order(tmp_path):
    (tmp_path / "prompts").write_text("one\ntwo\n")
    arguments = ["generate", "--prompts-file", tmp_path / "prompts", "--raw", "-n", 2, "--temp", 1]
    result = run(*arguments, "--stats")
    assert result.stdout.decode().splitlines() == [
        "answer 0 to one",
        "answer 1 to one",
        "answer 0 to two",
        "answer 1 to two",
    ]
    assert "answers:     4 with 12 tokens" in result.stderr.decode()
    lines = [json.loads(line) for line in run(*arguments, "--json").stdout.splitlines()]
    assert [(line["prompt"], line["index"]) for line in lines] == [
        ("one", 0),
        ("one", 1),
        ("two", 0),
        ("two", 1),
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "holds no prompt"),
        ("one\n{not json}", "line 2 starts like JSON"),
        ('{"text": "x"}', 'line 1 has no "prompt"'),
        ('{"prompt": 5}', 'line 1: "prompt" must be a text'),
    ],
)
def test_a_wrong_line_of_a_prompts_file_is_named(tmp_path, text, expected):
    (tmp_path / "prompts").write_text(text)
    result = run("generate", "--prompts-file", tmp_path / "prompts")
    assert_refused(result, expected, status=2)


# -- errors


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--temp", "-0.1"], "--temp: '-0.1' is not a number of at least 0"),
        (["--temp", "nan"], "at least 0"),
        (["--temp", "inf"], "at least 0"),
        (["--top-p", "1.01"], "'1.01' is not a number above 0 and at most 1"),
        (["--top-p", "0"], "above 0 and at most 1"),
        (["--min-p", "2"], "of at least 0 and at most 1"),
        (["--top-k", "-1"], "at least 0"),
        (["--top-k", "1.5"], "whole number"),
        (["--seed", "-1"], "from 0 to"),
        (["--max-tokens", "0"], "at least 1"),
        (["--block-size", "0"], "from 1 to 256"),
        (["--block-size", "300"], "'300' is not a whole number from 1 to 256"),
        (["--num-blocks", "0"], "at least 1"),
        (["--kv-memory", "0"], "above 0"),
        (["--num-blocks", "3", "--kv-memory", "1"], "not allowed with"),
        (["--attention", "flash"], "auto"),
        (["--dtype", "int8"], "float32"),
        (["--no-such-option"], "--no-such-option"),
        (["--raw", "--system", "x"], "--raw"),
        (["--prompts-file", "x"], "one prompt"),
        (["-n", "0"], "at least 1"),
        (["-n", "2"], "--temp 0 makes them all the same"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_option_is_refused_with_its_range(options, expected):
    assert_refused(run("generate", "hi", *options), expected, status=2)


@pytest.mark.parametrize(
    ("arguments", "stdin", "expected"),
    [
        (["generate"], None, "one prompt, - for stdin, or --prompts-file"),
        (["generate", ""], None, "empty"),
        (["generate", "-"], b"\n", "empty"),
        (["generate", "-"], b"abc\xff", "not valid UTF-8 (byte 3)"),
        (["generate", b"abc\xff"], None, "not valid UTF-8"),
        (["generate", "--prompts-file", "/no/such"], None, "/no/such can't be read"),
        (["frobnicate"], None, "generate"),
    ],
)
def test_a_wrong_command_line_is_refused(arguments, stdin, expected):
    result = subprocess.run([*FAKE, *arguments], input=stdin, capture_output=True, timeout=60)
    assert_refused(result, expected, status=2)


def test_without_a_command_the_help_is_shown():
    result = run()
    assert result.returncode == 2
    assert b"generate" in result.stderr
    assert result.stdout == b""


def test_what_the_user_can_mend_is_one_sentence():
    assert_refused(run("generate", "hi", "--model", "broken"), "there is no folder broken")


def test_running_out_of_memory_names_the_options_that_help():
    assert_refused(run("generate", "hi", "--model", "large"), "99 bytes", "--kv-memory")


def test_our_own_mistakes_keep_their_traceback():
    result = run("generate", "hi", "--model", "bug")
    assert result.returncode == 1
    assert b"Traceback" in result.stderr


# -- interrupts and pipes


def interrupt(process):
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=30)
    return process.returncode, error


@pytest.mark.parametrize(("model", "first"), [("smollm2", b"word0 "), ("slow", b"loading\n")])
def test_ctrl_c_ends_quietly_with_status_130(model, first):
    process = start("generate", "hi", "--model", model, SECONDS_PER_TOKEN="0.1")
    assert os.read(process.stdout.fileno(), 1000) == first
    assert interrupt(process) == (130, b"")


def test_a_second_ctrl_c_ends_even_a_computation_in_c_at_once():
    process = start("generate", "hi", "--model", "computing")
    assert process.stdout.readline() == b"loading\n"
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.5)
    assert interrupt(process) == (130, b"")


@pytest.mark.parametrize(
    "answer",
    [{"NUM_TOKENS": "50000"}, {"SECONDS_PER_TOKEN": "0.05"}],
    ids=["more than a pipe holds", "slow"],
)
def test_a_closed_pipe_ends_quietly(answer):
    process = start("generate", "hi", "--max-tokens", 10**6, **answer)
    assert os.read(process.stdout.fileno(), 6) == b"word0 "
    process.stdout.close()
    error = process.stderr.read()
    assert (process.wait(timeout=30), error) == (141, b"")


@pytest.mark.parametrize("arguments", [["--help"], ["doctor"], ["doctor", "--json"]])
def test_a_pipe_closed_from_the_start_ends_quietly(arguments):
    read_end, write_end = os.pipe()
    os.close(read_end)
    result = subprocess.run(
        [*REAL, *arguments], stdout=write_end, stderr=subprocess.PIPE, timeout=60
    )
    os.close(write_end)
    # Where Python doesn't buffer stdout, argparse swallows the error itself.
    assert result.returncode in ({0, 141} if arguments == ["--help"] else {141})
    assert result.stderr == b""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_full_disk_is_one_sentence():
    with open("/dev/full", "wb") as full:
        result = subprocess.run(
            [*FAKE, "generate", "hi"], stdout=full, stderr=subprocess.PIPE, timeout=60
        )
    assert result.returncode == 1
    assert result.stderr.decode().startswith("mlx-paged: [Errno 28]")
    assert result.stderr.count(b"\n") == 1


# -- with the real engine


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A small random model, which never ends by itself."""
    config = tiny_config(eos_token_id=259, max_position_embeddings=8192)
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), config, tiny_model(config))


def test_the_demo_model_answers(smollm2_path):
    result = run("generate", "What is the capital of France?", "--stats", command=REAL)
    assert result.stdout.decode() == "The capital of France is Paris.\n"
    stats = result.stderr.decode()
    # 37 tokens of prompt and 8 of answer, the last of which is never stored
    assert "generation:  8 tokens" in stats
    assert re.search(r"blocks: +3 of \d+ used, 16 tokens each; 91.7% of their slots", stats)


def test_a_prompt_that_can_never_fit_is_refused_with_the_numbers(checkpoint):
    options = ["--model", checkpoint, "--raw", "--block-size", 4, "--num-blocks", 3]
    result = run("generate", "ten bytes!", *options, "--max-tokens", 5, command=REAL)
    assert_refused(result, "needs 4 blocks of 4 tokens", "10 prompt tokens", "the pool has 3")
    result = run("generate", "ten bytes!", *options, "--max-tokens", 3, command=REAL)
    assert result.returncode == 0


def test_a_model_without_chat_template_asks_for_raw(checkpoint):
    result = run("generate", "hi", "--model", checkpoint, command=REAL)
    assert_refused(result, "no chat template", "--raw", status=2)


def test_answers_to_several_prompts_are_those_to_each_alone(checkpoint, tmp_path):
    options = ["--model", checkpoint, "--raw", "--max-tokens", 6, "--json"]
    prompts = ["one", "two and a half", "three"]
    (tmp_path / "prompts").write_text("\n".join(prompts))
    result = run("generate", "--prompts-file", tmp_path / "prompts", *options, command=REAL)
    together = [json.loads(line)["text"] for line in result.stdout.splitlines()]
    first = json.loads(run("generate", prompts[0], *options, command=REAL).stdout)["text"]
    assert len(together) == 3
    assert together[0] == first


def test_the_engine_is_interrupted_quietly(checkpoint):
    options = ["--model", checkpoint, "--raw", "--max-tokens", 4000]
    process = start("generate", "hi", *options, command=REAL)
    assert process.stdout.read(1) != b""
    assert interrupt(process) == (130, b"")


def test_the_engine_ends_quietly_when_its_reader_does(checkpoint):
    options = ["--model", checkpoint, "--raw", "--max-tokens", 4000]
    process = start("generate", "hi", *options, command=REAL)
    assert process.stdout.read(1) != b""
    process.stdout.close()
    assert (process.stderr.read(), process.wait(timeout=30)) == (b"", 141)


# -- help


def test_help_is_fast_because_nothing_heavy_is_imported():
    code = (
        "import sys; from mlx_paged.cli import main; main(['generate', '--help']); "
        "assert not {'mlx', 'mlx.core', 'mlx_lm', 'rich', 'numpy'} & set(sys.modules)"
    )
    start_time = time.perf_counter()
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, b"")
    assert time.perf_counter() - start_time < 2, "0.1 s on an idle machine"


def test_the_version_is_that_of_the_package():
    result = run("--version", command=REAL)
    assert re.fullmatch(rb"mlx-paged \d+\.\d+\.\d+\S*\n", result.stdout)


def test_help_names_every_option_of_the_contract():
    text = run("generate", "--help").stdout.decode()
    options = (
        "--model --max-tokens --temp --top-p --top-k --min-p --seed --block-size --num-blocks "
        "--kv-memory --attention --dtype --raw --system --stats --json --prompts-file"
    )
    assert [option for option in options.split() if option not in text] == []
