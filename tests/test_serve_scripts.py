"""serve_bench.py and serve_stress.py: what they count, and that they notice what is wrong."""

import asyncio
import json
import math
import os
import subprocess
import sys
import time

import _scripts
import mlx.core as mx
import pytest
from stub_openai_server import StubServer
from tiny_models import quantize, tiny_config, tiny_model, write_checkpoint

pytest.importorskip("httpx")

import serve_bench
import serve_stress
from serving import processes, prompts
from serving.acts import HUNG, LEFT, OK, Checks, check_flat, check_nothing_left, outcome
from serving.checkpoint import servable
from serving.client import CHAT, COMPLETIONS, Leave, Reply, ask, make_client
from serving.comparison import ROWS
from serving.load import Job, Phase, Target, percentile, run_phase, summarize
from serving.requests import long_requests, mixed_requests
from serving.small_server import left_over

TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
MIB = 2**20


@pytest.fixture
def stub():
    with StubServer() as server:
        yield server


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A small random model in 4 bits, with a chat template."""
    config = tiny_config("llama", eos_token_id=256, max_position_embeddings=4096)
    model = tiny_model(config, mx.bfloat16)
    path = tmp_path_factory.mktemp("tiny")
    write_checkpoint(path, quantize(model, config, 32, 4), model)
    settings = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    return path


def root(stub):
    return stub.url.removesuffix("/v1")


def one(stub, body, leave=None, path=CHAT):
    async def run():
        async with make_client(root(stub), 1, 20) as client:
            return await ask(client, path, body, leave)

    return asyncio.run(run())


STREAM = {"messages": [], "stream": True, "stream_options": {"include_usage": True}}


# -- the client


def test_each_piece_of_a_stream_has_the_time_when_it_came(stub):
    stub.seconds = 0.1
    reply = one(stub, STREAM)
    assert (reply.text, reply.status, reply.error) == ("word0 word1 word2", 200, None)
    assert reply.finish_reasons == {0: "stop"}
    assert (reply.num_tokens, reply.num_prompt_tokens, reply.num_cached_tokens) == (3, 20, 16)
    assert reply.first_seconds == pytest.approx(0.1, abs=0.08)
    assert reply.gaps == pytest.approx([0.1, 0.1], abs=0.08)
    assert reply.seconds == pytest.approx(0.3, abs=0.15)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_an_answer_in_one_piece_is_read_too(stub, path):
    reply = one(stub, {"messages": []} if path == CHAT else {"prompt": "x"}, path=path)
    assert (reply.text, reply.finish_reasons) == ("word0 word1 word2", {0: "stop"})
    assert (reply.num_tokens, reply.error) == (3, None)


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_leaves_after_its_time(stub, is_stream):
    stub.seconds = 0.3
    reply = one(stub, {**STREAM, "stream": is_stream}, Leave(0.1))
    assert reply.has_left and reply.seconds < 0.25 and not reply.text
    if is_stream:
        assert wait_for(lambda: stub.num_left == 1)


def test_a_client_leaves_after_so_many_pieces(stub):
    stub.words, stub.seconds = ["word "] * 50, 0.05
    reply = one(stub, STREAM, Leave(30, pieces=2))
    assert reply.has_left and reply.seconds < 1
    assert wait_for(lambda: stub.num_left == 1)


def test_what_is_no_whole_answer_is_an_error(stub):
    stub.cut_after = 1
    assert "RemoteProtocolError" in one(stub, STREAM).error
    stub.failure = (503, {"error": {"message": "the queue is full"}})
    reply = one(stub, STREAM)
    assert (reply.status, reply.error) == (503, "status 503: the queue is full")
    stub.failure = (200, {"choices": "none"})
    assert one(stub, {"messages": []}).error is not None


def wait_for(is_so, seconds=10):
    end = time.monotonic() + seconds
    while not is_so() and time.monotonic() < end:
        time.sleep(0.02)
    return is_so()


# -- loads and numbers


def test_percentiles_are_values_that_came():
    values = [5, 1, 4, 2, 3]
    assert [percentile(values, p) for p in (1, 20, 21, 50, 99, 100)] == [1, 1, 2, 3, 5, 5]
    assert math.isnan(percentile([], 50))


def reply_of(start, times, end, text="x", error=None, num_tokens=None):
    usage = {} if num_tokens is None else {"completion_tokens": num_tokens, "prompt_tokens": 7}
    texts, reasons = {0: text}, {0: "stop"}
    return Reply(start, end, 200, texts, reasons, list(times), usage, error)


def test_a_load_is_summed_up_by_whole_answers_and_all_the_time():
    first = [reply_of(0, [1, 2, 4], 4), reply_of(10, [12], 13, num_tokens=5)]
    second = [reply_of(0, [3, 3.5], 4), reply_of(0, [9], 9, error="broken")]
    found = summarize([Phase(first, 5), Phase(second, 3)])
    assert (found["num_requests"], found["num_errors"], found["errors"]) == (4, 1, ["broken"])
    assert (found["num_output_tokens"], found["num_prompt_tokens"]) == (3 + 5 + 2, 7)
    assert (found["output_tokens_per_s"], found["requests_per_s"]) == (10 / 8, 3 / 8)
    assert [found[f"ttft_p{p}_s"] for p in (50, 90)] == [2, 3]
    assert [found[f"itl_p{p}_s"] for p in (50, 99)] == [1, 2]
    assert found["e2e_p50_s"] == 4


def test_so_many_clients_work_at_once_and_replies_keep_their_order(stub):
    stub.seconds = 0.1
    jobs = [Job({**STREAM, "number": i}) for i in range(6)]
    phase = run_phase(Target(root(stub), "m"), jobs, 3, 20)
    assert len(phase.replies) == 6
    assert 0.5 < phase.seconds < 1.2, "two turns of 0.3 s, and 0.02 s between the clients"
    assert {body["model"] for body in stub.bodies} == {"m"}
    starts = [reply.start for reply in phase.replies]
    assert starts == sorted(starts)


def test_prompts_are_different_and_as_many_as_wanted(monkeypatch, tmp_path):
    monkeypatch.setattr(prompts, "SHARED_DATA", tmp_path)
    texts = prompts.chat_prompts(150)
    assert len(set(texts)) == 150
    assert texts == prompts.chat_prompts(150)
    lengths = [len(text.split()) for text in texts]
    assert min(lengths) < 20 and 300 < max(lengths) < 620


def test_mixed_requests_are_all_that_they_should_be():
    jobs = mixed_requests(500, 0.2, seed=1)
    assert [job.body for job in jobs] == [job.body for job in mixed_requests(500, 0.2, seed=1)]
    assert jobs != mixed_requests(500, 0.2, seed=2)
    leaving = [job for job in jobs if job.leave]
    assert len(leaving) == 100
    assert {job.body["stream"] for job in leaving} == {True, False}
    assert any(job.leave.pieces for job in leaving)
    assert {job.path for job in jobs} == {CHAT, COMPLETIONS}
    assert {job.body["n"] for job in jobs} == {1, 2, 3}
    lengths = [len(job.body["prompt"]) for job in jobs if "prompt" in job.body]
    assert min(lengths) < 8 and 500 < max(lengths) <= 600
    assert {job.body["max_tokens"] for job in jobs} == set(range(1, 65))
    assert any("stop" in job.body for job in jobs)


# -- processes


def test_a_server_that_ends_is_quoted():
    command = [sys.executable, "-c", "print('no such model, on port {port}'); raise SystemExit(3)"]
    with processes.ServerProcess("broken", command, "/ready") as server:
        message = f"broken ended with status 3:\nno such model, on port {server.port}"
        with pytest.raises(RuntimeError, match=message):
            server.wait_ready(20)


PARENT = """
import subprocess, sys, time
memory = bytearray(30 * 2**20)
child = subprocess.Popen([sys.executable, "-c", "x = bytearray(90 * 2**20); print(1, flush=True); "
    "import time; time.sleep(60)"], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""


def test_memory_is_counted_with_the_children_and_stopping_ends_them():
    with processes.ServerProcess("parent", [sys.executable, "-c", PARENT], "/") as server:
        assert wait_for(lambda: server.log_tail(), 20)
        child = int(server.log_tail())
        sizes = processes.rss_of_tree(server.pid)
        assert list(sizes) == [server.pid, child] == processes.tree(server.pid)
        assert 30 * MIB < sizes[server.pid] < 90 * MIB < sizes[child]
        with processes.MemoryMeter(server.pid, 0.01) as meter:
            assert wait_for(lambda: meter.peak_nbytes > 120 * MIB)
        assert server.stop(10) == -15
        assert wait_for(lambda: not processes.is_running(child))
    assert processes.tree(server.pid) == []


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_ps_and_proc_agree_on_a_process():
    if not any(os.access(f"{folder}/ps", os.X_OK) for folder in os.get_exec_path()):
        pytest.skip("no ps here")
    mine = os.getpid()
    by_proc, by_ps = processes._proc_table()[mine], processes._ps_table()[mine]
    assert by_proc[0] == by_ps[0]
    assert by_ps[1] == pytest.approx(by_proc[1], rel=0.1)


# -- the bench


def bench(capsys, *options):
    status = serve_bench.main([*map(str, options), "--json"])
    return status, json.loads(capsys.readouterr().out)


SMALL = ["--rounds", 2, "--concurrency", 1, 3, "--requests", 2, "--tokens", 5]


def test_two_servers_get_the_same_prompts_in_turn(stub, capsys, tmp_path):
    with StubServer(seconds=0.05) as slow:
        urls = ["--ours-url", root(stub), "--theirs-url", slow.url]
        status, result = bench(capsys, *SMALL, *urls, "--plot", tmp_path / "plot.png")
    assert status == 0
    assert [load["concurrency"] for load in result["loads"]] == [1, 3]
    first, second = result["loads"]
    assert (first["num_same_answers"], second["num_same_answers"]) == (4, 12)
    assert first["mlx-paged"]["num_output_tokens"] == 4 * 3
    assert min(first["ratios"]["output_tokens_per_s"], first["ratios"]["itl_p50_s"]) > 2
    assert len(first["round_ratios"]) == 2
    ours, theirs = ([b["messages"][0]["content"] for b in s.bodies] for s in (stub, slow))
    assert sorted(ours) == sorted(theirs)
    measured = ours[-16:]
    assert len(set(measured)) == 16, "no prompt twice"
    assert stub.bodies[-1]["max_tokens"] == 5 and stub.bodies[-1]["temperature"] == 0
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_other_answers_are_counted_and_the_table_has_every_number(stub, capsys):
    with StubServer(words=["word0 ", "word1 ", "word3"]) as other:
        urls = ["--ours-url", root(stub), "--theirs-url", root(other)]
        assert serve_bench.main([*map(str, SMALL), *urls]) == 0
    output = capsys.readouterr().out
    assert "the same answer from both to 0 of 4; tokens/s in each round:" in output
    assert all(label in output for label in ROWS)


def test_errors_are_told_and_are_the_exit_status(stub, capsys):
    with StubServer() as broken:
        jobs = serve_bench.run_loads

        def then_break(sides, args):
            broken.cut_after = 1
            jobs(sides, args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(serve_bench, "run_loads", then_break)
            urls = ["--ours-url", root(stub), "--theirs-url", root(broken)]
            status, result = bench(capsys, *SMALL, *urls)
    assert status == 1
    load = result["loads"][0]
    assert (load["mlx-lm"]["num_errors"], load["mlx-paged"]["num_errors"]) == (4, 0)
    assert load["num_same_answers"] == 0


def test_a_server_that_cannot_answer_or_be_reached_is_a_sentence(stub):
    stub.failure = (500, {"error": {"message": "out of order"}})
    with pytest.raises(RuntimeError, match="mlx-paged can't answer: status 500: out of order"):
        serve_bench.main(["--ours-url", root(stub), "--skip-theirs"])
    with pytest.raises(ValueError, match="names no model"):
        serve_bench.main(["--ours-url", "http://127.0.0.1:1", "--skip-theirs"])


def test_a_prefix_that_saves_too_little_is_the_exit_status(stub, capsys):
    options = ["--ours-url", root(stub), "--skip-theirs", "--shared-prefix", "--quick"]
    stub.seconds = 0.02
    status, result = bench(capsys, *options)
    assert status == 1
    side = result["sides"]["mlx-paged"]
    assert side["num_cached_tokens"] == [16, 16]
    assert side["share"] > 0.5
    texts = [[m["content"] for m in body["messages"]] for body in stub.bodies[-4:]]
    assert texts[0][0] == texts[1][0] != texts[2][0] == texts[3][0]
    assert texts[0][1] != texts[1][1]
    assert len(texts[0][0].split()) > 1500


def test_a_servable_folder_has_the_weights_of_this_library_in_float32(checkpoint, tmp_path):
    from mlx_lm.utils import load_model

    from mlx_paged.loader import load

    if mx.default_device().type == mx.DeviceType.gpu:
        pytest.skip("on a GPU the folder is the model's own")
    folder = servable(str(checkpoint), tmp_path / "float32")
    theirs, config = load_model(folder)
    assert "quantization" not in config
    ours = load(checkpoint).model
    assert mx.array_equal(
        theirs.model.layers[0].mlp.up_proj.weight, ours.model.layers[0].mlp.up_proj.weight
    )
    assert theirs.model.embed_tokens.weight.dtype == mx.float32
    assert (folder / "tokenizer.json").read_bytes() == (checkpoint / "tokenizer.json").read_bytes()
    assert TEMPLATE in json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]


def test_both_servers_start_and_answer_alike(checkpoint, capsys):
    pytest.importorskip("uvicorn")
    options = ["--model", checkpoint, "--quick", "--tokens", 4, "--concurrency", 1, 2]
    status, result = bench(capsys, *options, "--kv-memory", "0.05")
    assert status == 0
    assert [load["num_same_answers"] for load in result["loads"]] == [1, 2]
    assert min(result["peak_memory_bytes"].values()) > 50 * MIB


# -- the stress


def test_a_reply_is_whole_or_named_by_what_is_wrong():
    job, two = Job({}), Job({"n": 2})
    whole = reply_of(0, [1], 2)
    assert outcome(whole, job, 10) == OK
    assert outcome(whole, two, 10) == "1 of 2 answers ended"
    assert outcome(whole, job, 2) == HUNG
    assert outcome(reply_of(0, [1], 2, error="broken"), job, 10) == "broken"
    whole.finish_reasons = {0: "error"}
    assert outcome(whole, job, 10) == "answers ended by ['error']"
    whole.has_left = True
    assert outcome(whole, job, 10) == LEFT


@pytest.mark.parametrize(
    ("sizes", "is_flat"),
    [
        ([100] * 4 + [500] * 40, True),
        ([400 + i for i in range(60)], True),
        ([400 + 3 * i for i in range(60)], False),
        ([100] * 30 + [180] * 30, False),
        ([100] * 5, False),
    ],
)
def test_memory_that_grows_is_noticed(sizes, is_flat):
    checks = Checks()
    check_flat("memory", [size * MIB for size in sizes], checks)
    assert checks.all_ok == is_flat


def test_what_is_left_over_is_named():
    names = ('pool_blocks{state="used"}', "requests_open", "samples_running", "samples_waiting")
    metrics = {f"mlx_paged_{name}": 0.0 for name in names}
    checks = Checks()
    check_nothing_left(metrics, checks)
    assert checks.all_ok
    for name in metrics:
        assert left_over({**metrics, name: 2.0}) == {name: 2.0}
    check_nothing_left({**metrics, "mlx_paged_requests_open": 1.0}, checks)
    assert not checks.all_ok and "requests_open" in checks.rows[-1]["seen"]


def test_long_requests_do_not_end_by_themselves():
    jobs = long_requests(4, seed=0)
    assert [job.body["stream"] for job in jobs] == [True, False, True, False]
    assert all(job.body["ignore_eos"] and job.body["max_tokens"] >= 400 for job in jobs)


def test_the_server_survives_a_small_stress(checkpoint):
    pytest.importorskip("uvicorn")
    script = _scripts.SCRIPTS / "serve_stress.py"
    options = "--requests 60 --concurrency 16 --num-blocks 250 --shutdown-timeout 1 --json"
    command = [sys.executable, str(script), "--model", str(checkpoint), *options.split()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.stdout, result.stderr
    found = json.loads(result.stdout)
    failed = [check for check in found["checks"] if not check["ok"]]
    assert (failed, result.returncode) == ([], 0)
    assert len(found["checks"]) == 14
    assert found["mixed_load"]["num_left"] + found["mixed_load"]["num_whole"] == 60


def test_a_failed_check_is_the_exit_status(monkeypatch, capsys):
    act = {"seconds": 1, "num_whole": 2, "num_output_tokens": 3, "num_left": 4, "slowest_s": 5}

    def run(args, checks):
        checks.add("all is well", args.seed == 0, "seen")
        return {"num_requests": 6, "mixed_load": act}

    monkeypatch.setattr(serve_stress, "run", run)
    assert serve_stress.main([]) == 0
    assert serve_stress.main(["--seed", "1"]) == 1
    assert "FAILED" in capsys.readouterr().out
