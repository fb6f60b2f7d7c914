"""`qkv chat`: turns, what is reused, the history file, commands, Ctrl-C."""

from __future__ import annotations

import io
import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import qkv
from qkv.cli.history import Conversation
from qkv.text.chat import encode_chat
from qkv.text.hf import LibraryTokenizer
from qkv.text.training import train_bpe

from .helpers import Result
from .programs import interrupted_after, started

Command = Callable[..., Result]

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
USER, ASSISTANT, SYSTEM = "user", "assistant", "system"
SHORT = ("--greedy", "--max-new-tokens", "6")


def tokenizer(template: str | None = CHATML) -> LibraryTokenizer:
    trained = train_bpe(
        ["the cat sat on the mat and said hello to the user and the assistant"] * 4,
        300,
        controls=("<|im_end|>", "<|im_start|>"),
    )
    trained.specials = replace(trained.specials, chat_template=template)
    return trained


def model_of(words: LibraryTokenizer) -> qkv.TextModel:
    """A small model that never ends by itself."""
    config = qkv.preset("llama-3-8b").toy().override({"vocab_size": words.vocab_size, "head.bias": True})
    model = qkv.build(config, seed=3)
    with torch.no_grad():
        model.head.bias[list(words.specials.ends)] = -100.0
    return qkv.TextModel(model, words)


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("talker") / "model"
    model_of(tokenizer()).save(folder)
    return folder


@pytest.fixture
def talk(command: Command, talker: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """`talk("Hi\\n", "--greedy")` pipes a line into `qkv chat`."""

    def run(lines: str, *options: str, terminal: bool = False) -> Result:
        stdin = io.StringIO(lines)
        monkeypatch.setattr(stdin, "isatty", lambda: terminal)
        monkeypatch.setattr("sys.stdin", stdin)
        return command("chat", str(talker), *options)

    return run


def told(*turns: str, system: str | None = None) -> list[dict[str, str]]:
    """The messages of a conversation: what the user and the model said in turn."""
    first = [] if system is None else [{"role": SYSTEM, "content": system}]
    return first + [{"role": (USER, ASSISTANT)[number % 2], "content": content} for number, content in enumerate(turns)]


def answers(talker: Path, *asked: str, system: str | None = None) -> list[str]:
    """What the library says to each message in turn, with nothing reused."""
    lm, turns = qkv.load(talker), list[str]()
    for message in asked:
        turns.append(message)
        turns.append(lm.chat(told(*turns, system=system), 6, decoding=qkv.Greedy()).text)
    return turns[1::2]


def test_turns_equal_the_library(talk: Callable[..., Result], talker: Path) -> None:
    first, second = answers(talker, "hello", "the mat?")
    shown = talk("hello\n\n  \nthe mat?\n", *SHORT)
    assert shown.code == 0
    assert shown.out == f"{first}\n{second}\n"
    lines = shown.err.splitlines()
    assert len(lines) == 2
    assert re.fullmatch(r"6 tokens in \d+\.\d\d s \(.* tokens/s\), the first after .* s; cache [\d,]+ bytes", lines[0])
    reused = re.search(r"; (\d+) of (\d+) tokens before it reused$", lines[1])
    assert reused is not None
    # All that the first turn has read; of its answer, what is written with the same tokens when it is read.
    before, whole = (len(encode_chat(tokenizer(), told(*turns))) for turns in (["hello"], ["hello", first, "the mat?"]))
    assert before <= int(reused[1]) < int(reused[2]) == whole


def test_decoding_and_system_text(talk: Callable[..., Result], talker: Path) -> None:
    shown = talk("hello\n", "--seed", "7", "--top-k", "9", "--max-new-tokens", "12", "--system", "said the cat")
    decoding = qkv.Sampling(temperature=0.8, seed=7, top_k=9)
    messages = told("hello", system="said the cat")
    assert shown.out == qkv.load(talker).chat(messages, 12, decoding=decoding).text + "\n"
    stop = shown.out[3:5]
    stopped = talk("hello\n", "--seed", "7", "--top-k", "9", "--max-new-tokens", "12", "--system", "said the cat",
                   "--stop", stop)  # fmt: skip
    assert stopped.out == shown.out[: shown.out.index(stop)] + "\n"


def test_a_history_is_kept_and_gone_on_with(talk: Callable[..., Result], talker: Path, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    first, second = answers(talker, "hello", "the mat?", system="s")
    talk("hello\n", *SHORT, "--history", str(file), "--system", "s")
    assert json.loads(file.read_text()) == told("hello", first, system="s")
    shown = talk("the mat?\n", *SHORT, "--history", str(file))
    assert shown.out == f"{second}\n"
    assert shown.err.startswith(f"2 messages so far, from {file}\n")
    assert json.loads(file.read_text()) == told("hello", first, "the mat?", second, system="s")
    talk("/undo\n", "--history", str(file), "--system", "another")
    assert json.loads(file.read_text()) == told("hello", first, system="another")
    assert [path.name for path in tmp_path.iterdir()] == ["talk.json"]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "not JSON"),
        (b'[{"role": "user", "content": "Hi"}', "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"role": "user"}', "not a list of messages"),
        (b'[{"role": "user", "content": "Hi"}, {"role": "model", "content": "Hi"}]', "message 2 is no role"),
        (b'[{"role": "user", "content": 3}]', "message 1 is no role"),
        (b"[3]", "message 1 is no role"),
    ],
)
def test_a_damaged_history_is_left_as_it_is(
    talk: Callable[..., Result], tmp_path: Path, content: bytes, problem: str
) -> None:
    file = tmp_path / "talk.json"
    file.write_bytes(content)
    shown = talk("hello\n/reset\n", *SHORT, "--history", str(file), "--system", "s")
    assert (shown.code, shown.out) == (2, "")
    assert shown.err.startswith(f"qkv: {file}: holds no conversation ({problem}")
    assert shown.err.endswith("it is left as it is, give another file\n")
    assert shown.err.count("\n") == 1
    assert file.read_bytes() == content


@pytest.mark.parametrize(
    ("name", "problem"), [("no/talk.json", "there is no folder"), (".", "cannot be read (Is a directory)")]
)
def test_a_history_that_cannot_be(talk: Callable[..., Result], tmp_path: Path, name: str, problem: str) -> None:
    shown = talk("hello\n", *SHORT, "--history", str(tmp_path / name))
    assert (shown.code, shown.out) == (2, "")
    assert problem in shown.err
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize("step", ["os.fsync", "os.replace"])
def test_a_write_that_fails_leaves_the_older_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    file = tmp_path / "talk.json"
    conversation = Conversation(file)
    conversation.answered(conversation.asked("a"), "b")
    before = file.read_bytes()

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(step, full)
    with pytest.raises(OSError, match="No space left"):
        conversation.answered(conversation.asked("c"), "d")
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["talk.json"]


def test_a_link_to_a_history_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "talk.json").symlink_to(tmp_path / "kept" / "talk.json")
    conversation = Conversation(tmp_path / "talk.json", "s")
    conversation.answered(conversation.asked("a"), "b")
    assert (tmp_path / "talk.json").is_symlink()
    assert Conversation(tmp_path / "kept" / "talk.json").messages == told("a", "b", system="s")


def test_commands(talk: Callable[..., Result], talker: Path, tmp_path: Path) -> None:
    saved, file = tmp_path / "saved.json", tmp_path / "talk.json"
    first, slash = answers(talker, "hello", "/help")
    (alone,) = answers(talker, "the cat")
    lines = ("hello", "the mat?", "/undo", f"/save {saved}", "//help", "/reset", "the cat", "/exit", "never")
    shown = talk("\n".join(lines) + "\n", *SHORT, "--history", str(file))
    assert shown.code == 0
    assert json.loads(saved.read_text()) == told("hello", first)
    assert json.loads(file.read_text()) == told("the cat", alone)
    assert len(shown.out.splitlines()) >= 4
    assert shown.out.startswith(f"{first}\n")
    assert shown.out.endswith(f"{slash}\n{alone}\n")


def test_help_and_what_is_no_command(talk: Callable[..., Result]) -> None:
    shown = talk("/help\n/quit\n/undo\n/save\n", *SHORT)
    assert re.findall(r"^/\w+", shown.out, flags=re.M) == ["/help", "/reset", "/undo", "/save", "/exit"]
    assert shown.err.splitlines() == [
        "qkv: /quit: unknown command; /help lists them (a message that begins with / is written //)",
        "qkv: /undo: nothing was said yet",
        "qkv: /save: name a new file: /save talk.json",
    ]
    assert shown.code == 0


def test_save_replaces_nothing(talk: Callable[..., Result], tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("mine")
    shown = talk(f"/save {file}\n", *SHORT)
    assert (shown.code, shown.err) == (2, f"qkv: {file}: exists already; choose another file\n")
    assert file.read_text() == "mine"


BAD = "no \ufdd0 character"


def test_a_mistake_ends_a_script(talk: Callable[..., Result], tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    shown = talk(f"hello\n{BAD}\nnever\n", *SHORT, "--history", str(file))
    assert shown.code == 2
    assert shown.err.splitlines()[1].startswith("qkv: a message holds U+FDD0")
    assert len(shown.err.splitlines()) == 2
    assert len(json.loads(file.read_text())) == 2


def test_a_mistake_costs_a_person_one_message(talk: Callable[..., Result], talker: Path, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    first, second = answers(talker, "hello", "the mat?")
    shown = talk(f"hello\n{BAD}\n/save {tmp_path}\nthe mat?\n", *SHORT, "--history", str(file), terminal=True)
    assert shown.code == 0
    assert shown.out.startswith(f"> {first}\n> ")
    assert shown.out.endswith(f"> {second}\n> \n")  # the end of the input, as Ctrl-D
    assert "qkv: a message holds U+FDD0" in shown.err
    assert f"qkv: {tmp_path}: exists already" in shown.err
    assert json.loads(file.read_text()) == told("hello", first, "the mat?", second)


def test_a_note_beyond_the_trained_length(talk: Callable[..., Result], talker: Path) -> None:
    limit = qkv.load(talker).config.max_seq_len
    shown = talk("hello\n" + "the cat " * limit + "\n", *SHORT)
    first, note, second = shown.err.splitlines()
    assert first.startswith("6 tokens in ")
    assert note == f"qkv: the model was trained on {limit} tokens at a time; what lies beyond may be poor"
    assert second.startswith("6 tokens in ")


def test_a_message_that_is_no_text(talk: Callable[..., Result]) -> None:
    shown = talk("a\udcff\n", *SHORT)
    assert (shown.code, shown.err) == (2, "qkv: the text is no UTF-8 at character 2; convert it\n")


def test_ctrl_c_at_the_prompt_ends_it(talk: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(prompt: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupted)
    shown = talk("", *SHORT, terminal=True)
    assert (shown.code, shown.out, shown.err) == (0, "\n", "")


def test_ctrl_c_stops_an_answer_and_not_the_program(talker: Path, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    program = started("chat", talker, "--greedy", "--max-new-tokens", "20000", "--history", file)
    assert program.stdin is not None
    program.stdin.write("hello\n")
    program.stdin.flush()
    first = interrupted_after(program, 30)
    deadline = time.monotonic() + 60
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    program.stdin.write("the mat?\n")
    program.stdin.flush()
    assert program.stdout is not None
    while not first.endswith("\n"):
        first += program.stdout.read(1)
    second = interrupted_after(program, 30)
    second += program.communicate("/undo\n/exit\n", timeout=60)[0]
    assert program.returncode == 0
    (kept,) = [message["content"] for message in json.loads(file.read_text()) if message["role"] == ASSISTANT]
    assert kept == first.removesuffix("\n")
    assert second.endswith("\n")


def test_an_answer_that_had_not_begun_is_not_kept(
    talk: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(qkv.TextModel, "stream_chat", interrupted)
    shown = talk("hello\n", *SHORT, "--history", str(tmp_path / "talk.json"))
    assert shown.code == 0
    assert shown.err.startswith("interrupted: 0 tokens in ")
    assert not (tmp_path / "talk.json").exists()


@pytest.mark.parametrize("kind", ["bytes", "template"])
def test_a_model_without_a_template(command: Command, saved: Path, tmp_path: Path, kind: str) -> None:
    folder = saved
    if kind == "template":
        folder = tmp_path / "m"
        model_of(tokenizer(None)).save(folder)
    shown = command("chat", str(folder))
    assert (shown.code, shown.out) == (2, "")
    assert shown.err == (
        f"qkv: {folder}: has no chat template, so it cannot chat; continue texts with `qkv generate`\n"
    )
