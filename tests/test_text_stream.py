"""Text as it comes: no half characters, nothing of a stop string."""

import pytest
from tiny_models import write_tokenizer

from mlx_paged.engine.text import TextStream


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """One token per byte, so that characters and stop strings are always split."""
    from mlx_lm.utils import load_tokenizer

    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return load_tokenizer(path)


def stream(tokenizer, text, stop=(), may_stop_from=0, **kwargs):
    """Feed a text byte by byte. Returns the stream and the pieces shown, the end's last."""
    first = tokenizer.encode("a", add_special_tokens=False)[-1]
    out = TextStream(tokenizer.detokenizer, stop, first_token_id=first, **kwargs)
    pieces = []
    data = text if isinstance(text, list) else tokenizer.encode(text, add_special_tokens=False)
    for i, token_id in enumerate(data):
        hit = out.add(token_id, may_stop=i >= may_stop_from)
        pieces.append(out.take())
        if hit:
            break
    out.finish()
    return out, [*pieces, out.take()]


@pytest.mark.parametrize(
    "text", ["plain", " leading space", "näïve 日本 🎉 end", "two\nlines", "a  b "]
)
def test_pieces_make_up_the_text_and_are_whole_characters(tokenizer, text):
    out, pieces = stream(tokenizer, text)
    assert "".join(pieces) == out.text == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_half_a_character_at_the_end_is_left_out(tokenizer):
    token_ids = tokenizer.encode("ok 🎉", add_special_tokens=False)[:-1]
    out, _ = stream(tokenizer, token_ids)
    assert out.text == "ok "


@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("abcDEFGHIJxyz", ["DEFGHIJ"], "abc"),
        ("abcDEFGHIxyz", ["DEFGHIJ"], "abcDEFGHIxyz"),
        ("aaab", ["aab"], "a"),
        ("one\n\ntwo", ["\n\n"], "one"),
        ("x END y", ["D y", "END"], "x "),
        ("x日本y", ["日本"], "x"),
        ("END", ["END"], ""),
        ("ababac", ["abac"], "ab"),
        ("tail EN", ["END"], "tail EN"),
    ],
)
def test_a_stop_string_ends_the_text_and_nothing_of_it_is_ever_shown(tokenizer, text, stop, shown):
    out, pieces = stream(tokenizer, text, stop)
    assert "".join(pieces) == out.text == shown
    assert (out.stop_string is not None) == (shown != text)
    for i in range(len(pieces)):
        assert shown.startswith("".join(pieces[:i]))


def test_what_cannot_become_a_stop_string_is_shown_at_once(tokenizer):
    _, pieces = stream(tokenizer, "abED", ["END"])
    assert pieces == ["a", "b", "", "ED", ""]


def test_the_stop_string_can_be_part_of_the_text(tokenizer):
    out, pieces = stream(tokenizer, "x END y", ["END"], include_stop=True)
    assert "".join(pieces) == out.text == "x END"


def test_no_stop_before_min_tokens(tokenizer):
    out, _ = stream(tokenizer, "END and END.", ["END"], may_stop_from=3)
    assert out.text == "END and "
