"""A conversation: turns, interruption, a full context, commands, and the lines of a pipe."""

import io
import itertools
import signal
import sys
from pathlib import Path

import pytest

from lasd import cli
from lasd.artifacts import load_artifact
from lasd.chat import ChatSession
from lasd.chat_loop import ChatLoop
from lasd.decoding.decoder import Decoder
from lasd.decoding.sampling import SamplingParams
from lasd.drafters import load_drafter
from lasd.errors import LasdError
from tests.evaluation.tiny import MAX_POSITIONS, load_tiny, save_heads, save_model

PARAMS = SamplingParams(max_new_tokens=24, eos_token_ids=())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    save_model(folder / "model")
    save_heads(folder / "heads", load_tiny(folder / "model"))
    return folder


@pytest.fixture(scope="module")
def decoder(folder: Path) -> Decoder:
    target = load_tiny(folder / "model")
    return Decoder(target, load_drafter(load_artifact(folder / "heads"), target))


@pytest.fixture
def prompts(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The rendered conversations that the decoder is given."""
    seen: list[str] = []
    admit = Decoder.admit

    def recording(self, prompts, *args):
        seen.extend(self.target.tokenizer.decode(prompt) for prompt in prompts)
        return admit(self, prompts, *args)

    monkeypatch.setattr(Decoder, "admit", recording)
    return seen


def ask(session: ChatSession, message: str, pieces: int | None = None) -> str:
    """The answer, or what is shown of it when it is interrupted after a number of pieces."""
    stream = session.answer(message)
    text = "".join(itertools.islice(stream, pieces))
    stream.close()
    return text


def test_the_stream_is_the_answers_text(decoder):
    session = ChatSession(decoder, PARAMS)
    pieces = list(session.answer("hello"))
    ids = decoder.target.encode_chat([{"role": "user", "content": "hello"}])
    assert "".join(pieces) == session.turns[0].answer == decoder.generate([ids], PARAMS)[0].text
    assert len(pieces) > 3


def test_a_turn_knows_the_turns_before_it(decoder, prompts):
    session = ChatSession(decoder, PARAMS, system="Be brief.")
    first = ask(session, "hello")
    ask(session, "and then")
    assert prompts[-1].startswith("<|system|>Be brief.<|user|>hello<|assistant|>" + first[:4])
    assert prompts[-1].endswith("<|user|>and then<|assistant|>")


def test_an_interrupted_answer_stays_as_it_was_shown(decoder, prompts):
    session = ChatSession(decoder, PARAMS)
    shown = ask(session, "hello", pieces=4)
    turn = session.turns[-1]
    assert turn is session.last
    assert turn.interrupted
    assert turn.answer == shown != ""
    assert turn.result.finish_reason == "released"
    whole = ask(ChatSession(decoder, PARAMS), "hello")
    assert whole != shown
    assert whole.startswith(shown)


def test_after_an_interruption_the_slot_is_free_and_the_next_answer_is_right(decoder):
    session = ChatSession(decoder, PARAMS)
    ask(session, "hello", pieces=4)
    assert (decoder.live_slots, decoder.free_slots) == ([], 1)
    answer = ask(session, "and then")
    other = ChatSession(decoder, PARAMS)
    other.turns = session.turns[:1]
    assert ask(other, "and then") == answer


@pytest.mark.parametrize("pieces", range(1, 9))
def test_an_interruption_at_any_step_leaves_no_slot(decoder, pieces):
    session = ChatSession(decoder, PARAMS)
    shown = ask(session, "hi", pieces)
    assert decoder.live_slots == []
    assert [turn.answer for turn in session.turns] == ([shown] if shown else [])


def test_an_interruption_before_any_text_keeps_no_turn(decoder, monkeypatch):
    monkeypatch.setattr("lasd.streaming.TextStream.take", lambda self, tokens: "")
    session = ChatSession(decoder, PARAMS)
    assert ask(session, "hello", pieces=1) == ""
    assert (session.turns, session.last, decoder.live_slots) == ([], None, [])


def test_an_interruption_in_the_middle_of_a_step_keeps_what_was_shown(decoder, monkeypatch):
    session = ChatSession(decoder, PARAMS)
    stream = session.answer("hello")
    shown = next(stream) + next(stream) + next(stream)

    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "_commit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(stream)
    assert [turn.answer for turn in session.turns] == [shown]
    assert decoder.live_slots == []
    assert ask(session, "and then")


def test_an_error_while_decoding_keeps_no_turn_and_no_slot(decoder, monkeypatch):
    session = ChatSession(decoder, PARAMS)
    stream = session.answer("hello")
    next(stream)

    def failing(*args):
        raise LasdError("the model's logits are not finite")

    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "_commit", failing)
        with pytest.raises(LasdError, match="not finite"):
            next(stream)
    assert (session.turns, session.last, decoder.live_slots) == ([], None, [])
    assert ask(session, "hello")


LONG = "x" * 90


def test_a_full_context_is_refused_in_one_line_and_nothing_is_forgotten(decoder):
    session = ChatSession(decoder, PARAMS)
    ask(session, LONG)
    before = list(session.turns)
    with pytest.raises(LasdError, match=rf"with this message, the model {MAX_POSITIONS} positions: /drop forgets the"):
        ask(session, LONG)
    assert session.turns == before
    session.drop(1)
    assert ask(session, LONG)


def test_the_oldest_turns_are_dropped_when_that_was_asked_for(decoder, prompts):
    session = ChatSession(decoder, PARAMS, drop_oldest=True)
    for message in ("one", "two", "three", "x" * 40):
        ask(session, message)
    assert session.num_dropped == 1
    assert [turn.message for turn in session.turns] == ["two", "three", "x" * 40]
    assert prompts[-1].startswith("<|user|>two")


def test_a_message_that_never_fits_drops_nothing(decoder):
    session = ChatSession(decoder, PARAMS, drop_oldest=True)
    ask(session, "one")
    with pytest.raises(LasdError, match="the conversation has"):
        ask(session, "x" * MAX_POSITIONS)
    assert len(session.turns) == 1


def test_sampled_answers_differ_by_turn_and_repeat_by_session(decoder):
    params = SamplingParams(max_new_tokens=12, temperature=2.0, seed=5, eos_token_ids=())

    def talk() -> list[str]:
        session = ChatSession(decoder, params)
        first = ask(session, "hello")
        session.undo()
        return [first, ask(session, "hello")]

    first, second = talk()
    assert first != second
    assert talk() == [first, second]


def test_a_template_that_refuses_the_system_prompt_is_one_line(decoder, monkeypatch):
    template = "{{ raise_exception('no system role') if messages[0]['role'] == 'system' }}"
    monkeypatch.setattr(decoder.target.tokenizer, "chat_template", template)
    with pytest.raises(LasdError, match=r"refuses the conversation \(no system role\): .* /system without a text"):
        ask(ChatSession(decoder, PARAMS, system="Be brief."), "hello")


# The loop


class Chat:
    """A loop over a session, fed with lines."""

    def __init__(self, decoder: Decoder, **settings) -> None:
        self.session = ChatSession(decoder, PARAMS, **settings)
        self.out, self.err = io.StringIO(), io.StringIO()
        self.loop = ChatLoop(self.session, self.out, self.err, "medusa")

    def __call__(self, *lines: str) -> tuple[str, str]:
        """(answers, remarks) of these lines."""
        for stream in (self.out, self.err):
            stream.seek(0)
            stream.truncate()
        left = iter(lines)
        self.loop.run(lambda: next(left, None))
        return self.out.getvalue(), self.err.getvalue()


@pytest.fixture
def chat(decoder: Decoder) -> Chat:
    return Chat(decoder)


def test_an_answer_is_followed_by_its_statistics(chat):
    out, err = chat("hello")
    assert out == chat.session.turns[0].answer + "\n"
    assert err.startswith("medusa: 24 tokens in ")
    for part in ("tokens/s", "tokens a step", "drafted tokens accepted"):
        assert part in err


def test_empty_lines_are_no_messages(chat):
    assert chat("", "  \n") == ("", "")


def test_two_slashes_begin_a_message(chat, prompts):
    chat("//etc is a folder")
    assert "<|user|>/etc is a folder<|assistant|>" in prompts[-1]


def test_undo_takes_the_newest_turn_back(chat):
    chat("one", "two")
    assert chat("/undo")[1] == "(taken back: two)\n"
    assert [turn.message for turn in chat.session.turns] == ["one"]


def test_reset_forgets_the_turns_and_keeps_the_system_prompt(chat, prompts):
    chat("/system Be brief.", "one", "/reset", "two")
    assert prompts[-1].startswith("<|system|>Be brief.<|user|>two")


def test_system_without_a_text_removes_the_system_prompt(chat, prompts):
    chat("/system Be brief.", "/system", "one")
    assert prompts[-1].startswith("<|user|>one")


def test_drop_forgets_the_oldest_turns(chat):
    chat("one", "two", "three", "/drop 2")
    assert [turn.message for turn in chat.session.turns] == ["three"]
    assert "takes a number of turns" in chat("/drop few")[1]


def test_stats_are_of_the_whole_session(chat):
    chat("one", "two", "/undo")
    _, err = chat("/stats")
    assert err.startswith("medusa: 2 answers, 48 tokens in ")
    assert f"; 1 turns fill {chat.session.context_tokens} of {MAX_POSITIONS} positions" in err


def test_help_names_every_command(chat):
    _, err = chat("/help")
    assert all(name in err for name in (*chat.loop.commands, "/exit"))


def test_an_unknown_command_is_one_line_and_no_message(chat):
    out, err = chat("/rest")
    assert out == ""
    assert err.startswith("error: command /rest is unknown; it must be one of /system")
    assert err.count("\n") == 1


def test_exit_leaves_the_rest_unread(chat):
    assert chat("/exit", "hello") == ("", "")


def test_a_full_context_is_a_line_and_the_chat_goes_on(chat):
    chat(LONG)
    out, err = chat(LONG, "/reset", "hello")
    assert err.startswith("error: the conversation has ")
    assert out == chat.session.turns[0].answer + "\n"


def test_an_answer_that_fills_the_context_says_so(chat):
    _, err = chat("x" * (MAX_POSITIONS - 40))
    assert f"(cut: the conversation fills the model's {MAX_POSITIONS} positions; /drop" in err


class CtrlC(io.StringIO):
    """Output during which Ctrl-C is pressed: at the given writes."""

    def __init__(self, *places: int) -> None:
        super().__init__()
        self.places, self.count = places, 0

    def write(self, text: str) -> int:
        self.count += 1
        for _ in range(self.places.count(self.count)):
            signal.raise_signal(signal.SIGINT)
        return super().write(text)


@pytest.mark.parametrize("places", [(3,), (3, 3), (2, 3)])
def test_ctrl_c_ends_the_answer_and_the_chat_goes_on(chat, places):
    before = signal.getsignal(signal.SIGINT)
    chat.loop.out = CtrlC(*places)
    _, err = chat("hello")
    assert "(interrupted; what was shown stays in the conversation, /undo takes it back)" in err
    assert chat.session.turns[0].interrupted
    assert signal.getsignal(signal.SIGINT) is before
    chat.loop.out = chat.out
    assert chat("go on")[0] == chat.session.turns[1].answer + "\n"


def test_a_second_ctrl_c_does_not_wait_for_the_step(chat, monkeypatch):
    def slow(self) -> list[int]:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the second one was ignored")

    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "step", slow)
        out, err = chat("hello")
    assert out == (chat.session.turns[0].answer if chat.session.turns else "") + "\n"
    assert "(interrupted" in err
    assert chat.session.decoder.live_slots == []


# The command


def lasd(command: str, lines: str, folder: Path, monkeypatch, capsys) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of `lasd` with these lines on its standard input."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["lasd", *command.split(" ")])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode("latin-1")), encoding="utf-8"))
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    out, err = capsys.readouterr()
    return int(exit_.value.code or 0), out, err


def test_chat_answers_the_lines_of_a_pipe(folder, monkeypatch, capsys):
    command = "chat --model model --artifact heads --system brief --max-new-tokens 8 --dtype fp32 --device cpu"
    code, out, err = lasd(command, "hello\n/stats\nand then\n/exit\nnever\n", folder, monkeypatch, capsys)
    assert code == 0
    assert len(out) >= 2
    assert err.count("medusa: ") == 3


def test_chat_takes_bytes_that_are_no_text(folder, monkeypatch, capsys):
    code, _, err = lasd("chat --model model --max-new-tokens 2", "caf\xe9\n", folder, monkeypatch, capsys)
    assert code == 0
    assert err.count("plain: ") == 1


def test_chat_refuses_an_unknown_method(folder, monkeypatch, capsys):
    code, _, err = lasd("chat --model model --method medsa", "", folder, monkeypatch, capsys)
    assert code == 2
    assert "method 'medsa' is unknown" in err
