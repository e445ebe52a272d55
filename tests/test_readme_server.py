"""The README's examples of the server, run as they stand but for the port."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from server_process import demo_server

__all__ = ["demo_server"]

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
ADDRESS = "http://127.0.0.1:8000"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
CURLS = [text for language, text in BLOCKS if language == "sh" and text.startswith("curl")]
PROGRAMS = [text for language, text in BLOCKS if language == "python" and "openai" in text]


def shell(command, server):
    script = command.replace(ADDRESS, server.url)
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=120)


def test_the_readme_shows_chat_stream_and_schema():
    assert len(CURLS) == 3 and len(PROGRAMS) == 1
    assert all(ADDRESS in text for text in (*CURLS, *PROGRAMS))


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("command", CURLS, ids=["chat", "stream", "schema"])
def test_a_curl_example_works_as_pasted(command, demo_server):
    done = shell(command, demo_server)
    assert done.returncode == 0, done.stderr
    if '"stream": true' in command:
        assert done.stdout.rstrip().endswith("data: [DONE]")
        indices = {json.loads(line[6:])["choices"][0]["index"] for line in events(done.stdout)}
        assert indices == {0, 1, 2}
        return
    content = json.loads(done.stdout)["choices"][0]["message"]["content"]
    if "json_schema" in command:
        assert set(json.loads(content)) == {"name", "age"}
    else:
        assert len(content) > 40


def test_the_python_example_calls_the_tool(demo_server, capsys):
    exec(PROGRAMS[0].replace(ADDRESS, demo_server.url), {})
    assert "get_weather" in capsys.readouterr().out


def events(text):
    lines = [line for line in text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "data: [DONE]"
    return lines
