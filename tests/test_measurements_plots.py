"""Every measuring script explains itself and draws its picture."""

import re

import _scripts
import beam
import blocksize
import capacity
import fragmentation
import preempt
import prefix
import pytest
import waste

SCRIPTS = {
    waste: ["--requests", "20"],
    blocksize: ["--requests", "20"],
    capacity: ["--requests", "20", "--models", "0.5B", "--memory", "8", "16"],
    fragmentation: ["--requests", "200", "--sweep-requests", "30", "--loads", "5", "20"],
    beam: ["--requests", "3"],
    preempt: ["--requests", "40", "--no-model", "--loads", "0.5", "1"],
    prefix: ["--lengths", "--first", "4"],
}


def run(script, arguments, monkeypatch):
    """As on the command line."""
    monkeypatch.setattr("sys.argv", [script.__file__, *arguments])
    return script.main()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_help_shows_how_to_call_it(script, capsys, monkeypatch):
    with pytest.raises(SystemExit) as end:
        run(script, ["--help"], monkeypatch)
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert f"python scripts/{script.__name__}.py" in text
    assert "--json" in text and "--plot FILE" in text


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_a_picture_and_a_table_are_made(script, tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    file = tmp_path / "picture.png"
    assert not run(script, [*SCRIPTS[script], "--plot", str(file)], monkeypatch)
    assert file.read_bytes().startswith(b"\x89PNG")
    assert "━" in capsys.readouterr().out


def test_the_table_of_results_names_every_script():
    text = (_scripts.SCRIPTS / "README.md").read_text()
    for file in _scripts.SCRIPTS.glob("*.py"):
        assert re.search(rf"`{file.name}[` ]", text), file.name
