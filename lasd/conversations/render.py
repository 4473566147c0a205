"""Rendering by chat template, and the assistant mask of given conversations.

Spans are found by rendering, never by searching for role strings and never by tokenising pieces: the assistant's part
of turn i is what the template's rendering through turn i adds to its rendering of the turns before with the generation
prompt, and tokens get their place from the tokenizer's character offsets of the one full text.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from lasd.errors import LasdError


@dataclass(slots=True)
class Rendered:
    """Token ids of one training record and, for each, whether it is the assistant's (1) or not (0)."""

    input_ids: list[int]
    loss_mask: list[int]
    turns: int


def render_text(tokenizer: Any, messages: Sequence[dict[str, str]], add_generation_prompt: bool = True) -> str:
    """The template's text for these turns.

    Raises:
        LasdError: the tokenizer has no chat template, or the template refuses the turns.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise LasdError(
            f"tokenizer {getattr(tokenizer, 'name_or_path', '')} has no chat template, expected one: use the model's "
            "chat or instruct version, or set tokenizer.chat_template"
        )
    from jinja2.exceptions import TemplateError

    try:
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except TemplateError as error:
        raise LasdError(f"the chat template refuses these turns: {error}") from error
    return str(text)


def render_ids(tokenizer: Any, messages: Sequence[dict[str, str]], add_generation_prompt: bool = True) -> list[int]:
    """The token ids of `render_text`, as the template's own tokenisation gives them."""
    text = render_text(tokenizer, messages, add_generation_prompt)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def render_training(
    tokenizer: Any, messages: Sequence[dict[str, str]], eos_token_ids: Collection[int] | None = None
) -> list[Rendered]:
    """Token ids and assistant mask of a given conversation, all its turns in one record if the template allows it.

    The label span of a turn starts behind the generation prompt and ends with its end-of-turn token; what the template
    puts behind that token is not labelled. If the rendering of more turns does not extend the rendering so far (some
    templates drop earlier reasoning), the record is closed and a new one starts with that history unlabelled.

    Args:
        tokenizer: a fast tokenizer with a chat template.
        messages: turns that end with an assistant's.
        eos_token_ids: tokens that end an answer; None means the tokenizer's own.

    Raises:
        LasdError: no chat template, no offsets (a slow tokenizer), or the template hides the assistant's part.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise LasdError("the assistant mask needs a fast tokenizer (character offsets); this one is slow: convert it")
    ends = {tokenizer.eos_token_id} if eos_token_ids is None else set(eos_token_ids)
    records: list[Rendered] = []
    text = ""
    spans: list[tuple[int, int]] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = render_text(tokenizer, messages[:index], True)
        full = render_text(tokenizer, messages[: index + 1], False)
        if not full.startswith(prompt):
            raise LasdError(
                "the chat template's rendering of an answer does not extend its generation prompt, so the answer's "
                "part cannot be found: distil the model's own answers instead (token ids come from generation there)"
            )
        if spans and not full.startswith(text):
            records.append(_mask(tokenizer, text, spans, ends))
            spans = []
        text = full
        spans.append((len(prompt), len(full)))
    if spans:
        records.append(_mask(tokenizer, text, spans, ends))
    return records


def _mask(tokenizer: Any, text: str, spans: list[tuple[int, int]], ends: set[int]) -> Rendered:
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = list(encoded["input_ids"]), encoded["offset_mapping"]
    mask = [0] * len(ids)
    position = 0
    for start, stop in spans:
        while position < len(ids) and offsets[position][0] < start:
            position += 1
        first = position
        while position < len(ids) and offsets[position][0] < stop:
            position += 1
        last = next((index for index in range(position - 1, first - 1, -1) if ids[index] in ends), position - 1)
        mask[first : last + 1] = [1] * (last + 1 - first)
    return Rendered(ids, mask, len(spans))
