"""The assistant mask covers exactly the answers, for templates that extend and for templates that do not."""

from typing import Any

import pytest

from lasd.conversations import render_ids, render_training
from lasd.errors import LasdError

TALK = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "assistant\nhi <b>ü</b>"},
    {"role": "assistant", "content": "hello 🙂"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": " so long "},
]
FORGETFUL = (
    "{% for m in messages %}[{{ m['role'] }}]"
    "{% if m['role'] == 'assistant' and not loop.last %}...{% else %}{{ m['content'] }}{% endif %}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def labelled(tokenizer: Any, rendered: Any) -> str:
    ids = [token for token, mask in zip(rendered.input_ids, rendered.loss_mask, strict=True) if mask]
    return str(tokenizer.decode(ids))


def test_answers_and_their_end_tokens_are_labelled_and_nothing_else(tokenizer: Any) -> None:
    (rendered,) = render_training(tokenizer, TALK)
    assert labelled(tokenizer, rendered) == "hello 🙂<|im_end|> so long <|im_end|>"
    assert rendered.turns == 2


def test_ids_are_those_of_the_template(tokenizer: Any) -> None:
    (rendered,) = render_training(tokenizer, TALK)
    assert rendered.input_ids == render_ids(tokenizer, TALK, add_generation_prompt=False)


def test_an_open_turn_at_the_end_is_not_part_of_the_record(tokenizer: Any) -> None:
    (rendered,) = render_training(tokenizer, TALK[:4])
    assert labelled(tokenizer, rendered) == "hello 🙂<|im_end|>"


def test_a_template_that_rewrites_history_gives_a_record_for_each_answer(tokenizer: Any) -> None:
    tokenizer.chat_template = FORGETFUL
    first, second = render_training(tokenizer, TALK)
    assert labelled(tokenizer, first) == "hello 🙂<|im_end|>"
    assert labelled(tokenizer, second) == " so long <|im_end|>"
    assert "hello" not in tokenizer.decode(second.input_ids)


def test_without_a_template_there_is_no_guess(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    with pytest.raises(LasdError, match="no chat template"):
        render_training(tokenizer, TALK)


def test_a_template_that_refuses_is_one_line(tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(LasdError, match="no system role"):
        render_ids(tokenizer, TALK)


def test_a_template_that_hides_the_answer_is_refused(tokenizer: Any) -> None:
    tokenizer.chat_template = "{% if add_generation_prompt %}ASK{% else %}SAID{% endif %}"
    with pytest.raises(LasdError, match="does not extend"):
        render_training(tokenizer, TALK)
