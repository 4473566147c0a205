"""Turns are answered one after the other, ids and labels come from generation, slots are kept full."""

from collections.abc import Callable
from typing import Any

import pytest

from distill.filters import is_loop
from distill.generate import Job, TurnEncodingError, TurnRules, run_jobs
from lasd.conversations import Conversation, Message
from lasd.decoding.sampling import SamplingParams
from tests.distill.conftest import ScriptedDecoder

RULES = TurnRules(SamplingParams(max_new_tokens=40), max_prompt_tokens=400)


def conversation(name: str, *turns: str, system: str | None = None) -> Conversation:
    messages = [Message("system", system)] if system else []
    for turn in turns:
        messages += [Message("user", turn), Message("assistant", "somebody else's answer")]
    return Conversation(name, messages, "chat")


def last_question(prompt: str) -> str:
    return prompt.split("<|im_start|>user\n")[-1].split("<|im_end|>")[0]


def echo(prompt: str) -> str:
    return f"You said {last_question(prompt)}"


def answer_all(
    decoder: ScriptedDecoder,
    encode: Any,
    *conversations: Conversation,
    rules: TurnRules = RULES,
    group: int = 1,
) -> list[Job]:
    jobs = [Job.start(one, encode, rules.multi_turn) for one in conversations]
    finished = [job for job, _, done in run_jobs(decoder, jobs, rules, encode, group) if done]
    assert sorted(job.conversation.id for job in finished) == sorted(one.id for one in conversations)
    return finished


def labelled(tokenizer: Any, record: Any) -> str:
    ids = [token for token, mask in zip(record.input_ids, record.loss_mask, strict=True) if mask]
    return str(tokenizer.decode(ids))


def test_each_turn_is_built_on_the_models_own_answers(tokenizer: Any, encode: Any) -> None:
    (job,) = answer_all(ScriptedDecoder(tokenizer, echo), encode, conversation("a", "one", "two", system="Be brief."))
    assert [(m["role"], m["content"]) for m in job.messages] == [
        ("system", "Be brief."),
        ("user", "one"),
        ("assistant", "You said one"),
        ("user", "two"),
        ("assistant", "You said two"),
    ]


def test_a_conversation_is_one_record_with_the_answers_labelled(tokenizer: Any, encode: Any) -> None:
    (job,) = answer_all(ScriptedDecoder(tokenizer, echo), encode, conversation("a", "one", "two"))
    (record,) = job.records
    assert labelled(tokenizer, record) == "You said one<|im_end|>You said two<|im_end|>"
    assert (record.id, record.turns, record.finish, record.category) == ("a", 2, ["eos", "eos"], "chat")


def test_ids_are_the_templates_ids_of_the_whole_talk(tokenizer: Any, encode: Any) -> None:
    (job,) = answer_all(ScriptedDecoder(tokenizer, echo), encode, conversation("a", "one", "two"))
    text = tokenizer.apply_chat_template(job.messages, tokenize=False)
    assert tokenizer.decode(job.records[0].input_ids) == text.removesuffix("\n")


def test_a_template_that_rewrites_history_opens_a_new_record(tokenizer: Any, encode: Any) -> None:
    tokenizer.chat_template = tokenizer.chat_template.replace("{{ m['content'] }}", "{{ m['content'] | upper }}")
    (job,) = answer_all(ScriptedDecoder(tokenizer, echo), encode, conversation("a", "one", "two", "three"))
    assert [record.id for record in job.records] == ["a", "a#part2", "a#part3"]
    assert [labelled(tokenizer, record) for record in job.records] == [
        "You said ONE<|im_end|>",
        "You said TWO<|im_end|>",
        "You said THREE<|im_end|>",
    ]
    assert "YOU SAID ONE" in tokenizer.decode(job.records[1].input_ids)


def test_a_cut_answer_is_kept_without_end_token_and_ends_the_conversation(tokenizer: Any, encode: Any) -> None:
    rules = TurnRules(SamplingParams(max_new_tokens=12), 400)
    (job,) = answer_all(ScriptedDecoder(tokenizer, echo), encode, conversation("a", "one", "two"), rules=rules)
    (record,) = job.records
    assert labelled(tokenizer, record) == "You said one"
    assert record.finish == ["length"]


def test_cut_answers_can_be_dropped(tokenizer: Any, encode: Any) -> None:
    rules = TurnRules(SamplingParams(max_new_tokens=14), 400, drop_truncated=True)
    talks = (conversation("a", "one", "three"), conversation("b", "three"))
    jobs = {
        job.conversation.id: job for job in answer_all(ScriptedDecoder(tokenizer, echo), encode, *talks, rules=rules)
    }
    assert labelled(tokenizer, jobs["a"].records[0]) == "You said one<|im_end|>"
    assert [m["content"] for m in jobs["a"].messages] == ["one", "You said one"]
    assert (jobs["b"].records, jobs["b"].verdict) == ([], "answer_cut")


def test_an_empty_first_answer_sets_the_conversation_aside(tokenizer: Any, encode: Any) -> None:
    (job,) = answer_all(ScriptedDecoder(tokenizer, lambda prompt: " "), encode, conversation("a", "one"))
    assert (job.records, job.verdict) == ([], "empty_answer")


def test_an_empty_later_answer_only_ends_the_conversation(tokenizer: Any, encode: Any) -> None:
    script: Callable[[str], str] = lambda prompt: "" if "two" in prompt else "fine"  # noqa: E731
    (job,) = answer_all(ScriptedDecoder(tokenizer, script), encode, conversation("a", "one", "two", "three"))
    assert labelled(tokenizer, job.records[0]) == "fine<|im_end|>"
    assert (job.verdict, job.messages[-1]["content"]) == (None, "fine")


def test_loops_are_dropped_on_request(tokenizer: Any, encode: Any) -> None:
    sampling = SamplingParams(max_new_tokens=100)
    talk = conversation("a", "one")
    decoder = ScriptedDecoder(tokenizer, lambda prompt: "again and " * 20)
    (kept,) = answer_all(decoder, encode, talk, rules=TurnRules(sampling, 400))
    (dropped,) = answer_all(decoder, encode, talk, rules=TurnRules(sampling, 400, drop_repetitive=True))
    assert (kept.verdict, dropped.verdict) == (None, "repetitive_answer")


def test_a_history_over_the_limit_ends_the_conversation(tokenizer: Any, encode: Any) -> None:
    rules = TurnRules(SamplingParams(max_new_tokens=40), max_prompt_tokens=50)
    (job,) = answer_all(ScriptedDecoder(tokenizer, echo), encode, conversation("a", "one", "two"), rules=rules)
    assert [m["content"] for m in job.messages] == ["one", "You said one"]


def test_a_template_that_refuses_a_later_turn_ends_the_conversation(tokenizer: Any, encode: Any) -> None:
    def refuse_two(messages: list[dict[str, str]]) -> list[int]:
        if len(messages) > 1:
            raise TurnEncodingError("one turn only")
        return list(encode(messages))

    (job,) = answer_all(ScriptedDecoder(tokenizer, echo), refuse_two, conversation("a", "one", "two"))
    assert len(job.records) == 1


def test_single_turn_mode_asks_the_first_turn_only(tokenizer: Any, encode: Any) -> None:
    rules = TurnRules(SamplingParams(max_new_tokens=40), 400, multi_turn=False)
    (job,) = answer_all(ScriptedDecoder(tokenizer, echo), encode, conversation("a", "one", "two"), rules=rules)
    assert job.records[0].turns == 1


def test_prompts_of_like_length_share_a_prefill_and_none_is_padded_much(tokenizer: Any, encode: Any) -> None:
    decoder = ScriptedDecoder(tokenizer, lambda prompt: "ok", max_slots=4)
    talks = [conversation(f"c{i}", "x" * (1 + 37 * i % 300)) for i in range(30)]
    answer_all(decoder, encode, *talks, group=4)
    assert all(max(group) <= 2 * min(group) + 32 for group in decoder.groups)
    starts = [group[0] for group in decoder.groups]
    assert starts == sorted(starts)


def test_slots_are_kept_full_while_prompts_wait(tokenizer: Any, encode: Any) -> None:
    lengths = {f"q{i}": 3 + 7 * i % 20 for i in range(40)}
    decoder = ScriptedDecoder(tokenizer, lambda prompt: "y" * lengths[last_question(prompt)], max_slots=4)
    answer_all(decoder, encode, *[conversation(name, name) for name in lengths], group=2)
    steady = decoder.busy[: len(decoder.busy) // 2]
    assert min(steady) >= 3
    assert sum(steady) / len(steady) > 3.5


def test_newcomers_wait_for_a_group(tokenizer: Any, encode: Any) -> None:
    decoder = ScriptedDecoder(tokenizer, lambda prompt: "y" * len(prompt), max_slots=6)
    answer_all(decoder, encode, *[conversation(f"c{i}", "q" * (1 + i)) for i in range(30)], group=3)
    assert all(len(group) >= 3 for group in decoder.groups)


def test_the_seed_of_an_answer_depends_on_its_record_only(tokenizer: Any, encode: Any) -> None:
    talks = [conversation(f"c{i}", f"question {i}", "and now?") for i in range(6)]
    seeds = []
    for slots, order in ((1, talks), (4, talks[::-1])):
        decoder = ScriptedDecoder(tokenizer, echo, max_slots=slots)
        answer_all(decoder, encode, *order)
        seeds.append(decoder.seeds)
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0].values())) == 12


def test_another_run_seed_gives_other_seeds(encode: Any) -> None:
    job = Job.start(conversation("a", "one"), encode)
    assert job.seed(0) != job.seed(1)


@pytest.mark.parametrize(
    ("tokens", "loops"),
    [
        (list(range(64)), False),
        ([1, 2, 3] * 40, True),
        ([7] * 64, True),
        ([7] * 63, False),
        ([9, 8] + [5, 6] * 32, True),
    ],
)
def test_loops_are_recognised(tokens: list[int], loops: bool) -> None:
    assert is_loop(tokens) is loops
