"""`mlx-paged chat`: from a pipe, at a terminal, on an engine, with a server."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import _scripts  # noqa: F401
import pytest
from serving.processes import ServerProcess
from stub_openai_server import StubServer
from tiny_models import tiny_config, tiny_model, write_checkpoint

from mlx_paged.cli import chat, chat_models, manners
from mlx_paged.cli.arguments import build_parser
from mlx_paged.cli.chat_commands import Commands, Quit
from mlx_paged.cli.conversation import Conversation

REAL = [sys.executable, "-m", "mlx_paged", "chat"]
FAKE = [sys.executable, str(Path(__file__).with_name("fake_llm.py")), "chat"]
WORDS = "word0 word1 word2 "


def run(lines, *options, command=FAKE, **variables):
    return subprocess.run(
        [*command, *map(str, options)],
        input=lines if isinstance(lines, bytes) else lines.encode(),
        capture_output=True,
        env={**os.environ, "NUM_TOKENS": "3", **variables},
        timeout=60,
    )


# -- from a pipe


def test_each_line_is_a_question_and_only_answers_go_to_stdout():
    result = run("one\n\ntwo", "--system", "Be brief.", SHOW_PROMPT="1")
    assert (result.returncode, result.stdout.decode()) == (0, f"{WORDS}\n" * 2)
    prompts = re.findall(r"(\[system\].*) Sampling", result.stderr.decode())
    first = "[system]Be brief.[user]one[assistant]"
    assert prompts == [first, f"{first}{WORDS}[user]two[assistant]"]


def test_nothing_but_answers_is_written_unless_asked():
    assert run("hi\n").stderr == b""
    stats = run("hi\n", "--stats").stderr.decode()
    assert re.fullmatch(
        r"\[\d+ prompt tokens \(0 cached\), [\d.]+ s to the first, 3 tokens at [\d.]+ tokens/s\]\n",
        stats,
    )


def test_commands_work_from_a_pipe_too():
    lines = "one\n/clear\n//two\n/retry\n/params temp=0.5 max-tokens=2\nthree\n/quit\nfour\n"
    result = run(lines, SHOW_PROMPT="1")
    assert result.stdout.decode() == f"{WORDS}\n" * 3 + "word0 word1 \n"
    two = "[user]/two[assistant]"
    shown = re.findall(r"(\[user\].*) Sampling.*temperature=([\d.]+)", result.stderr.decode())
    assert shown == [
        ("[user]one[assistant]", "0.0"),
        (two, "0.0"),
        (two, "0.0"),
        (f"{two}{WORDS}[user]three[assistant]", "0.5"),
    ]


def test_every_answer_has_a_seed_of_its_own_that_follows_from_the_first():
    result = run("one\n/retry\ntwo\n", "--seed", 2**64 - 2, "--temp", 1, SHOW_PROMPT="1")
    seeds = re.findall(r"seed=(\d+)", result.stderr.decode())
    assert seeds == [str(2**64 - 2), str(2**64 - 1), "0"]


@pytest.mark.parametrize(
    ("lines", "options", "expected", "status"),
    [
        (b"hi\n\xff\n", [], "line 2 of stdin is not valid UTF-8", 2),
        ("/frob\nhi\n", [], "there is no command /frob; /help lists them", 1),
        ("/retry\n", [], "nothing has been asked yet", 1),
        ("hi\n", ["--model", "broken"], "there is no folder broken", 1),
        ("hi\n", ["--api-key", "x"], "--api-key is for a server, which --url names", 2),
        ("hi\n", ["--url", "http://x/v1", "--kv-bits", "8"], "--kv-bits is of the engine here", 2),
        ("hi\n", ["--url", "127.0.0.1:8000"], "it must begin with http:// or https://", 2),
    ],
)
def test_what_has_no_answer_ends_a_script_with_a_sentence(lines, options, expected, status):
    result = run(lines, *options)
    error = result.stderr.decode()
    assert (result.returncode, error.count("\n")) == (status, 1)
    assert error.startswith("mlx-paged: ") and expected in error


def test_ctrl_c_ends_a_script():
    process = subprocess.Popen(
        FAKE,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "SECONDS_PER_TOKEN": "0.1"},
    )
    process.stdin.write(b"one\ntwo\n")
    process.stdin.flush()
    assert os.read(process.stdout.fileno(), 100).startswith(b"word0 ")
    process.send_signal(signal.SIGINT)
    output, error = process.communicate(timeout=30)
    assert (process.returncode, error) == (130, b"")
    assert b"word0" not in output


def test_the_help_and_version_are_not_slowed_by_what_chat_needs():
    code = (
        "import sys; from mlx_paged.cli import main; main(['chat', '--help']); "
        "assert not {'mlx', 'mlx_lm', 'rich', 'openai', 'readline'} & set(sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, b"")
    assert b"--url" in result.stdout and b"--kv-memory" in result.stdout


# -- at a terminal


class Person:
    """Types at a terminal of its own and reads what comes."""

    def __init__(self, *options, command=FAKE, **variables):
        env = {**os.environ, "NUM_TOKENS": "3", "NO_COLOR": "1", "TERM": "dumb", **variables}
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execve(command[0], [*command, *map(str, options)], env)
        self.seen = ""

    def type(self, keys):
        os.write(self.fd, keys.encode())

    def interrupt_the_prompt(self):
        """Once it waits for keys: it would notice a signal just before that with the next key."""
        time.sleep(0.2)
        self.type(CTRL_C)

    def see(self, text, seconds=30):
        """Reads until the text has come, and drops all up to its end."""
        end = time.monotonic() + seconds
        while text not in self.seen:
            ready, _, _ = select.select([self.fd], [], [], max(0, end - time.monotonic()))
            assert ready, f"no {text!r} in {self.seen!r}"
            try:
                data = os.read(self.fd, 10000)
            except OSError:
                data = b""
            assert data, f"the end, and no {text!r} in {self.seen!r}"
            self.seen += data.decode()
        before, _, self.seen = self.seen.partition(text)
        return before

    def status(self):
        """Of the process, which must end by itself."""
        end = time.monotonic() + 30
        while time.monotonic() < end:
            select.select([self.fd], [], [], 0.05)
            with suppress(OSError):
                os.read(self.fd, 10000)
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.pid = None
                return os.waitstatus_to_exitcode(status)
        raise AssertionError("it does not end")

    def close(self):
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.fd)


@contextmanager
def person(*options, **variables):
    one = Person(*options, **variables)
    try:
        yield one
    finally:
        one.close()


CTRL_C, CTRL_D, UP = "\x03", "\x04", "\x1b[A"


def test_a_person_asks_is_answered_and_leaves():
    with person() as one:
        one.see("/help lists the commands, Ctrl-D leaves.")
        one.see("> ")
        one.type("hi\r")
        one.see(WORDS)
        one.see("> ")
        one.type("/nothing\r")
        one.see("there is no command /nothing")
        one.see("> ")
        one.type(CTRL_D)
        assert one.status() == 0


def test_lines_can_be_edited_recalled_and_continued():
    with person(SHOW_PROMPT="1") as one:
        one.see("> ")
        one.type("hx\x7fi\r")
        one.see("[user]hi[assistant]")
        one.see(WORDS)
        one.see("> ")
        one.type("/clear\r")
        one.see("> ")
        one.type(UP + UP + " again\\\r")
        one.see(". ")
        one.type("and more\r")
        one.see("[user]hi again\r\nand more[assistant]")


def test_ctrl_c_stops_an_answer_again_and_again_and_not_the_program():
    with person(NUM_TOKENS="1000", SECONDS_PER_TOKEN="0.05") as one:
        for _ in range(3):
            one.see("> ")
            one.type("hi\r")
            one.see("word1 ")
            one.type(CTRL_C)
            one.see("stopped; /retry asks again")
        one.see("> ")
        one.type("/save /dev/null\r")
        one.see("exists and is no saved conversation")


def test_a_second_ctrl_c_at_the_prompt_leaves_unless_a_line_came_between():
    with person() as one:
        one.see("> ")
        one.type("half a li")
        one.see("half a li")
        one.interrupt_the_prompt()
        one.see("Ctrl-C again, or Ctrl-D, leaves")
        one.see("> ")
        one.type("hi\r")
        one.see(WORDS)
        for _ in range(2):
            one.see("> ")
            one.interrupt_the_prompt()
        assert one.status() == 130


def test_an_answer_cut_off_at_the_limit_says_so():
    with person("--max-tokens", 2) as one:
        one.see("> ")
        one.type("hi\r")
        one.see("cut off at the limit; /params max-tokens=4 allows more")


def test_a_terminal_obeys_nothing_that_a_model_says():
    words = ["\x1b]0;title\x07", "\x9b2J", "a\tb\n"]
    with StubServer(words=words) as stub, person("--url", stub.url, command=REAL) as one:
        one.see("> ")
        one.type("hi\r")
        one.see("hi\r\n")
        answer = one.see("> ")
    assert "]0;title2Ja       b" in answer or "]0;title2Ja\tb" in answer
    assert not {"\x07", "\x9b"} & set(answer)


# -- commands and files


def commands():
    conversation, said = Conversation("Be brief."), []
    args = build_parser().parse_args(["chat", "--temp", "0.3"])
    return Commands(conversation, args, said.append), conversation, args, said


def test_a_conversation_comes_back_from_its_file(tmp_path):
    command, conversation, _, said = commands()
    conversation.ask("Grüße?")
    conversation.answer("ja")
    conversation.ask("and?")
    file = tmp_path / "a b.json"
    command.run(f"/save {file}")
    kept = conversation.messages
    assert json.loads(file.read_text(encoding="utf-8"))["messages"] == kept
    command.run("/clear")
    command.run("/system off")
    assert conversation.messages == []
    command.run(f"/load {file}")
    assert conversation.messages == kept
    assert conversation.is_asked
    assert said[0] == f"4 messages are in {file}"
    command.run(f"/save {file}")


@pytest.mark.parametrize(
    "content",
    ["", "{", "[1]", '{"messages": [{"role": "robot", "content": "x"}]}', "[" * 100_000, '"x"'],
)
def test_what_is_no_conversation_is_neither_loaded_nor_written_over(tmp_path, content):
    command, conversation, _, _ = commands()
    file = tmp_path / "notes"
    file.write_text(content)
    for name in ("/save", "/load"):
        with pytest.raises(ValueError, match="notes"):
            command.run(f"{name} {file}")
    assert file.read_text() == content
    assert conversation.system == "Be brief."


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/params temp=-1", "temp: '-1' is not a number of at least 0"),
        ("/params temp", "temp is not of the form NAME=VALUE"),
        ("/params warmth=3", "unrecognized arguments: warmth=3"),
        ("/params top-p=0.5 max_tokens=0", "max-tokens: '0' is not a whole number"),
        ("/params 'x", "No closing quotation"),
        ("/save", "name a file"),
        ("/load /no/such", "No such file"),
        ("/save /no/such/file", "No such file"),
    ],
)
def test_a_wrong_command_is_a_sentence_and_changes_nothing(line, message):
    command, conversation, args, said = commands()
    before = dict(vars(args)), conversation.messages
    with pytest.raises(ValueError, match=re.escape(message)):
        command.run(line)
    assert (dict(vars(args)), conversation.messages, said) == (*before, [])


def test_params_are_shown_and_changed():
    command, _, args, said = commands()
    command.run("/params top_p=0.5 seed=7")
    assert (args.top_p, args.seed, args.temp) == (0.5, 7, 0.3)
    assert said == ["max-tokens=256 temp=0.3 top-p=0.5 top-k=0 min-p=0.0 seed=7"]


def test_a_question_without_an_answer_is_replaced_and_asked_again():
    command, conversation, _, _ = commands()
    conversation.ask("one")
    conversation.ask("two")
    assert [m["content"] for m in conversation.turns] == ["two"]
    conversation.answer("yes")
    command.run("/retry")
    assert [m["content"] for m in conversation.turns] == ["two"]
    with pytest.raises(Quit):
        command.run("/exit")


# -- on an engine

TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A small random model with a chat template; it never ends by itself."""
    config = tiny_config(eos_token_id=259, max_position_embeddings=256)
    path = write_checkpoint(tmp_path_factory.mktemp("tiny"), config, tiny_model(config))
    settings = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    return path


def parse(*options):
    return build_parser().parse_args(["chat", *map(str, options)])


def local(checkpoint, *options):
    args = parse("--model", checkpoint, "--num-blocks", 64, "--block-size", 4, *options)
    return chat.LocalModel(args), args


def asked(question="hello"):
    conversation = Conversation()
    conversation.ask(question)
    return conversation


def test_a_follow_up_finds_the_conversation_in_the_pool(checkpoint):
    model, args = local(checkpoint, "--max-tokens", 8)
    conversation = asked()
    first = model.answer(conversation.messages, args, None, lambda text: None)
    conversation.answer(first.text)
    conversation.ask("and you?")
    second = model.answer(conversation.messages, args, None, lambda text: None)
    # "u:" and the question, a line end, "a:", in blocks of 4
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens >= first.num_prompt_tokens // 4 * 4 == 8


def test_an_engine_that_was_stopped_goes_on_as_if_nothing_had_been(checkpoint):
    model, args = local(checkpoint, "--max-tokens", 100)
    messages = asked().messages
    whole = model.answer(messages, args, None, lambda text: None)
    assert whole.num_generated_tokens == 100 and len(whole.text) > 50
    pieces = []

    def write(text):
        pieces.append(text)
        if len(pieces) == 5:
            signal.raise_signal(signal.SIGINT)

    stopped = []

    def command():
        for _ in range(3):
            pieces.clear()
            stopped.append(model.answer(messages, args, None, write))
        return 0

    assert manners.run(command) == 0
    assert [a.is_stopped for a in stopped] == [True] * 3
    assert all(whole.text.startswith(a.text) and a.num_generated_tokens == 5 for a in stopped)
    assert model._llm.stats().num_blocks_used == 0
    model._llm.engine.check_integrity()
    assert model.answer(messages, args, None, lambda text: None).text == whole.text


def test_a_long_prompt_is_stopped_before_its_first_token(checkpoint, monkeypatch):
    model, args = local(checkpoint)
    monkeypatch.setattr(
        chat_models.PrefillBar, "update", lambda *_: signal.raise_signal(signal.SIGINT)
    )
    answers = []
    ask = lambda: answers.append(model.answer(asked().messages, args, None, print)) or 0  # noqa: E731
    assert manners.run(ask) == 0
    assert answers[0].is_stopped and answers[0].num_generated_tokens == 0
    assert model._llm.stats().num_blocks_used == 0


def test_an_answer_takes_the_room_that_is_left_and_no_room_is_a_sentence(checkpoint):
    model, args = local(checkpoint, "--max-tokens", 200)
    answer = model.answer(asked("x" * 200).messages, args, None, lambda text: None)
    assert answer.num_prompt_tokens + answer.num_generated_tokens == 256
    with pytest.raises(ValueError, match=r"context of 256.*/clear forgets the conversation"):
        model.answer(asked("x" * 300).messages, args, None, lambda text: None)
    small, args = local(checkpoint, "--max-tokens", 200, "--num-blocks", 32)
    with pytest.raises(ValueError, match=r"the pool has 32.*/clear"):
        small.answer(asked("x" * 130).messages, args, None, lambda text: None)


def test_a_model_without_a_chat_template_is_refused(tmp_path):
    config = tiny_config()
    path = write_checkpoint(tmp_path / "plain", config, tiny_model(config))
    with pytest.raises(ValueError, match=r"no chat template.*generate --raw"):
        local(path)


# -- with a server


@pytest.fixture
def stub():
    pytest.importorskip("openai")
    with StubServer() as server:
        yield server


def remote(stub, *options):
    args = parse("--url", stub.url, *options)
    return chat.RemoteModel(args), args


def test_a_server_answers_with_what_was_asked_for(stub):
    options = (
        "--system S --temp 0.5 --top-p 0.9 --top-k 40 --max-tokens 7 --seed 3 --api-key secret"
    )
    result = run("one\ntwo\n", "--url", stub.url, "--stats", *options.split(), command=REAL)
    assert result.stdout.decode() == "word0 word1 word2\n" * 2
    assert "[20 prompt tokens (16 cached)," in result.stderr.decode()
    first, second = stub.bodies
    assert (first["model"], first["temperature"], first["top_p"]) == ("stub", 0.5, 0.9)
    assert (first["max_tokens"], first["seed"], second["seed"], first["top_k"]) == (7, 3, 4, 40)
    assert "min_p" not in first
    assert [m["content"] for m in second["messages"]] == ["S", "one", "word0 word1 word2", "two"]
    assert stub.headers[0]["Authorization"] == "Bearer secret"


def test_the_url_may_leave_out_v1_and_the_key_comes_from_the_environment(stub, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "second")
    monkeypatch.setenv("MLX_PAGED_API_KEY", "first")
    args = parse("--url", stub.url.removesuffix("/v1"))
    answer = chat.RemoteModel(args).answer(asked().messages, args, None, lambda text: None)
    assert answer.text == "word0 word1 word2"
    assert stub.headers[0]["Authorization"] == "Bearer first"


def test_one_of_several_models_must_be_named(stub):
    stub.models = ("a", "b")
    with pytest.raises(ValueError, match="serves a, b; name one with --model"):
        remote(stub)
    model, args = remote(stub, "--model", "b")
    model.answer(asked().messages, args, None, lambda text: None)
    assert stub.bodies[0]["model"] == "b"


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        ((401, {"error": {"message": "no"}}), "wants an API key: give --api-key"),
        ((400, {"error": {"message": "9 tokens are too many"}}), r"9 tokens are too many \(/clear"),
        ((404, {"error": "no model x"}), "says 404: no model x$"),
        ((503, {"error": {"message": "the queue is full"}}), "says 503: the queue is full$"),
        ((500, ["odd"]), "says 500: "),
    ],
)
def test_what_a_server_says_is_passed_on(stub, failure, expected):
    model, args = remote(stub)
    stub.failure = failure
    with pytest.raises(ValueError, match=expected):
        model.answer(asked().messages, args, None, lambda text: None)


def test_a_connection_that_breaks_is_a_sentence(stub):
    model, args = remote(stub)
    stub.cut_after = 1
    seen = []
    with pytest.raises(ValueError, match=r"the connection to http.* failed"):
        model.answer(asked().messages, args, None, seen.append)
    assert seen == ["word0 "]
    result = run("hi\n", "--url", stub.url, command=REAL)
    assert (result.returncode, result.stdout) == (1, b"word0 \n")
    result = run("hi\n", "--url", "http://127.0.0.1:1", command=REAL)
    assert (result.returncode, result.stdout) == (1, b"")
    assert b"Connection refused" in result.stderr and result.stderr.count(b"\n") == 1


def test_ctrl_c_hangs_up_on_a_server_that_is_still_silent(stub):
    stub.words, stub.seconds = ["word "] * 100, 0.3
    with person("--url", stub.url, command=REAL) as one:
        one.see("> ")
        one.type("hi\r")
        one.see("hi")
        while not stub.bodies:
            time.sleep(0.02)
        one.type(CTRL_C)
        one.see("stopped before any text")
        one.see("> ")
        one.type("again\r")
        one.see("word word ")
        one.type(CTRL_C)
        one.see("stopped; /retry asks again")
        one.see("> ")
        end = time.monotonic() + 10
        while stub.num_left < 2 and time.monotonic() < end:
            time.sleep(0.05)
    assert stub.num_left == 2


def test_without_the_package_openai_a_server_is_refused_with_the_command_to_install_it():
    code = (
        "import sys; sys.modules['openai'] = None; from mlx_paged.cli import main; "
        "sys.exit(main(['chat', '--url', 'http://127.0.0.1:1']))"
    )
    result = subprocess.run([sys.executable, "-c", code], input=b"hi\n", capture_output=True)
    assert result.returncode == 2
    assert result.stderr.decode().startswith("mlx-paged: --url needs the package openai: pip")


def test_our_own_server_answers_as_the_engine_here_does(checkpoint):
    pytest.importorskip("openai")
    pytest.importorskip("uvicorn")
    options = ["--model", checkpoint, "--block-size", 4, "--num-blocks", 64]
    serve = ["serve", *map(str, options), "--port", "{port}"]
    with ServerProcess("server", [sys.executable, "-m", "mlx_paged", *serve], "/ready") as server:
        server.wait_ready(60)
        asking = ["--max-tokens", 20, "--stats"]
        remote = run("hello\nand?\n", "--url", server.url, *asking, command=REAL)
        too_long = run("x" * 300, "--url", server.url, command=REAL)
    here = run("hello\nand?\n", *options, *asking, command=REAL)
    assert remote.stdout == here.stdout != b""
    counts = [re.findall(rb"\d+ prompt tokens \(\d+ cached\)", r.stderr) for r in (remote, here)]
    assert counts[0] == counts[1]
    assert len(counts[0]) == 2 and b"(0 cached)" not in counts[0][1]
    error = too_long.stderr.decode()
    assert too_long.returncode == 1
    assert "says 400: " in error and "/clear forgets the conversation" in error


# -- interrupts


def test_each_interrupt_that_is_dealt_with_leaves_the_next_a_first_one():
    def command():
        for _ in range(5):
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            manners.forget_interrupt()
            time.sleep(0.05)  # the watching thread counts
        with manners.interrupts_kept() as is_interrupted:
            assert not is_interrupted()
            signal.raise_signal(signal.SIGINT)
            assert is_interrupted()
        time.sleep(0.05)
        return 7

    assert manners.run(command) == 7
