"""Streamed text: only what stays, and in the end exactly the answer."""

import random

import pytest

from lasd.streaming import TextStream


class Bytes:
    """A tokenizer of one byte a token; 0 is a special token."""

    clean_up_tokenization_spaces = False

    def decode(self, tokens, skip_special_tokens):
        assert skip_special_tokens
        text = bytes(token for token in tokens if token).decode("utf-8", "replace")
        return text.replace(" .", ".").replace(" n't", "n't") if self.clean_up_tokenization_spaces else text


class Tidy(Bytes):
    """One that removes spaces before punctuation."""

    clean_up_tokenization_spaces = True


def stream_by(sizes, data: bytes, tokenizer=None, stop=()) -> list[str]:
    """The pieces of an answer whose tokens are committed in spans of the given sizes."""
    tokenizer = tokenizer or Bytes()
    stream, pieces, left = TextStream(tokenizer, stop), [], list(data)
    for size in sizes:
        pieces.append(stream.take(left[:size]))
        left = left[size:]
    whole = tokenizer.decode(list(data), skip_special_tokens=True)
    cuts = [whole.find(one) for one in stop if one in whole]
    return [*pieces, stream.finish(whole[: min(cuts)] if cuts else whole)]


def test_text_is_given_out_as_soon_as_it_is_committed():
    assert stream_by([2, 3], b"hello") == ["he", "llo", ""]


def test_an_incomplete_character_is_held_back_and_what_is_before_it_is_not():
    data = "aé€😀".encode()
    assert stream_by([2, 1, 2, 1, 2, 2], data) == ["a", "é", "", "€", "", "😀", ""]


def test_bytes_that_never_become_a_character_come_at_the_end():
    assert stream_by([2, 1], b"a\xf0\x9f") == ["a", "", "\ufffd"]


def test_special_tokens_give_no_text():
    assert stream_by([2, 1], b"a\0b") == ["a", "b", ""]


def test_the_beginning_of_a_stop_string_is_held_back():
    assert stream_by([3, 1, 1, 2], b"ab<enxt", stop=("<end>", "nope")) == ["ab", "", "", "<enxt", ""]


def test_a_stop_string_is_never_shown():
    assert stream_by([4, 4], b"ab<end>c", stop=("<end>",)) == ["ab", "", ""]


def test_a_tokenizer_that_tidies_spaces_is_streamed_by_the_word():
    assert stream_by([4, 1, 1, 1], b"do it .", Tidy()) == ["do", "", " it", "", "."]


@pytest.mark.parametrize("tokenizer", [Bytes(), Tidy()])
@pytest.mark.parametrize("seed", range(20))
def test_all_pieces_together_are_the_text_of_any_bytes(seed, tokenizer):
    draw = random.Random(seed)
    words = ["é", "😀", "a .", " n't", " ", "b", "zz", "\n"]
    data = b"".join(draw.choice([draw.choice(words).encode(), bytes([draw.randrange(1, 256)])]) for _ in range(60))
    sizes = [draw.randrange(1, 5) for _ in range(len(data))]
    pieces = stream_by(sizes, data, tokenizer, stop=("zza",))
    whole = tokenizer.decode(list(data), skip_special_tokens=True)
    assert "".join(pieces) == whole.split("zza")[0]


def test_a_tokenizer_that_changes_shown_text_is_reported(caplog):
    stream = TextStream(Bytes())
    stream.take(list(b"ab"))
    assert stream.finish("axe") == "xe"
    assert "changed text that was already streamed" in caplog.text
