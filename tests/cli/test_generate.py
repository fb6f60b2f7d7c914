"""`qkv generate`: it prints what the library gives, whatever the options; Ctrl-C; one line for every mistake."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import qkv
from qkv.cli import stream
from qkv.generate import Generation, json_schema
from qkv.text import ByteTokenizer

from .helpers import Result
from .programs import interrupted_after, started

Command = Callable[..., Result]

SUMMARY = r"\d+ tokens? in \d+\.\d\d s \(\d+\.\d tokens/s\)(, the first after \d+\.\d\d s)?(; cache [\d,]+ bytes)?"
NINE = ("--max-new-tokens", "9")


@pytest.fixture(scope="module")
def positions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of bytes with a fixed number of positions."""
    folder = tmp_path_factory.mktemp("positions") / "model"
    config = qkv.preset("gpt2").toy().override({"vocab_size": 256})
    qkv.TextModel(qkv.build(config, seed=3), ByteTokenizer()).save(folder)
    return folder


def generations(shown: Result) -> list[dict[str, Any]]:
    assert shown.code == 0, shown.err
    found: list[dict[str, Any]] = json.loads(shown.out)["generations"]
    return found


def test_the_prompt_is_continued(command: Command, saved: Path) -> None:
    expected = qkv.load(saved).generate("The ", 9, decoding=qkv.Sampling(temperature=0.5, seed=4))
    shown = command("generate", str(saved), "The ", *NINE, "--temperature", "0.5", "--seed", "4")
    assert shown.out == f"The {expected.text}\n"
    assert re.fullmatch(SUMMARY + "\n", shown.err)
    assert shown.err.startswith("9 tokens in ")
    assert "the first after" in shown.err


def test_json_tells_everything(command: Command, saved: Path) -> None:
    expected = qkv.load(saved).generate(["The ", "A"], 9, decoding=qkv.Sampling(temperature=0.8))
    shown = command("generate", str(saved), "The ", "A", *NINE, "--json")
    for prompt, one, found in zip(("The ", "A"), expected, generations(shown), strict=True):
        assert found == {"prompt": prompt, "sample": 0, **vars(one)}
    usage = json.loads(shown.out)["usage"]
    assert usage["new_tokens"] == 18
    assert usage["seconds"] > 0
    assert usage["cache_bytes"] > 0
    assert shown.err == ""


OPTIONS: list[tuple[tuple[str, ...], qkv.Greedy | qkv.Sampling | qkv.Beam]] = [
    (("--greedy",), qkv.Greedy()),
    (("--temperature", "0"), qkv.Greedy()),
    (("--greedy", "--repetition-penalty", "1.3"), qkv.Greedy(repetition_penalty=1.3)),
    (("--top-k", "3"), qkv.Sampling(temperature=0.8, top_k=3)),
    (("--top-p", "0.5", "--seed", "2"), qkv.Sampling(temperature=0.8, top_p=0.5, seed=2)),
    (("--min-p", "0.9", "--temperature", "2"), qkv.Sampling(temperature=2.0, min_p=0.9)),
    (("--repetition-penalty", "9"), qkv.Sampling(temperature=0.8, repetition_penalty=9.0)),
    (("--beam", "3"), qkv.Beam(width=3)),
]


@pytest.mark.parametrize(("options", "decoding"), OPTIONS)
def test_each_decoding(command: Command, saved: Path, options: tuple[str, ...], decoding: Any) -> None:
    expected = qkv.load(saved).generate("The ", 9, decoding=decoding)
    assert command("generate", str(saved), "The ", *NINE, *options).out == f"The {expected.text}\n"
    (found,) = generations(command("generate", str(saved), "The ", *NINE, *options, "--json"))
    assert found["tokens"] == expected.tokens


def test_decodings_differ(saved: Path) -> None:
    lm = qkv.load(saved)
    texts = {str(decoding): lm.generate("The ", 9, decoding=decoding).text for _, decoding in OPTIONS}
    assert len(texts) == len(OPTIONS) - 1
    assert len(set(texts.values())) > 4


def test_several_prompts_come_one_after_another(command: Command, saved: Path) -> None:
    first, second = qkv.load(saved).generate(["The ", "Is it"], 9, decoding=qkv.Greedy())
    shown = command("generate", str(saved), "The ", "Is it", *NINE, "--greedy")
    assert shown.out == f"The {first.text}\n\nIs it{second.text}\n"
    assert shown.err.startswith("18 tokens in ")
    assert shown.err.count("\n") == 1


def test_several_samples_share_their_prompt(command: Command, saved: Path) -> None:
    expected = qkv.load(saved).samples("The ", 3, 9, decoding=qkv.Sampling(temperature=0.8, seed=5))
    options = (*NINE, "--n", "3", "--seed", "5")
    shown = command("generate", str(saved), "The ", *options)
    assert shown.out == "\n".join(f"The {one.text}\n" for one in expected)
    assert re.fullmatch(SUMMARY + "\n", shown.err)
    assert shown.err.startswith("27 tokens in ")
    found = generations(command("generate", str(saved), "The ", "A", *options, "--json"))
    assert [(one["prompt"], one["sample"]) for one in found] == [(p, s) for p in ("The ", "A") for s in range(3)]
    assert [one["tokens"] for one in found[:3]] == [one.tokens for one in expected]


def test_stop_ends_the_text(command: Command, saved: Path) -> None:
    lm = qkv.load(saved)
    text = lm.generate("The ", 30, decoding=qkv.Greedy()).text
    stop = text[4:6]
    expected = lm.generate("The ", 30, decoding=qkv.Greedy(), stop=[stop, "zzz"])
    assert expected.finish_reason == "stop"
    shown = command("generate", str(saved), "The ", "--greedy", "--max-new-tokens", "30", "--stop", stop,
                    "--stop", "zzz")  # fmt: skip
    assert shown.out == f"The {expected.text}\n"
    assert stop not in expected.text


@pytest.mark.parametrize("draft", ["lookup", "itself"])
@pytest.mark.parametrize("choice", ["--greedy", "--seed=3"])
def test_a_draft_changes_the_speed_alone(command: Command, saved: Path, draft: str, choice: str) -> None:
    plain = command("generate", str(saved), "The The The ", choice, "--max-new-tokens", "20")
    drafted = command("generate", str(saved), "The The The ", choice, "--max-new-tokens", "20",
                      "--draft", "lookup" if draft == "lookup" else str(saved))  # fmt: skip
    assert drafted.code == 0, drafted.err
    if choice == "--greedy" or draft == "lookup":
        assert drafted.out == plain.out
    assert drafted.err.startswith("20 tokens in ")


def test_text_that_must_be_json(command: Command, saved: Path, tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99, "minimum": 0}},
              "required": ["n"], "additionalProperties": False}  # fmt: skip
    (tmp_path / "s.json").write_text(json.dumps(schema))
    shown = command("generate", str(saved), "Answer:", "--json-schema", str(tmp_path / "s.json"), "--greedy")
    assert shown.code == 0, shown.err
    assert 0 <= json.loads(shown.out.removeprefix("Answer:"))["n"] <= 99
    lm = qkv.load(saved)
    expected = lm.generate("Answer:", decoding=qkv.Greedy(), constraint=json_schema(schema, ByteTokenizer()))
    assert shown.out == f"Answer:{expected.text}\n"


def test_text_that_must_match(command: Command, saved: Path) -> None:
    shown = command("generate", str(saved), "Call ", "--regex", "[0-9]{3}-[a-c]{4}")
    assert re.fullmatch(r"Call [0-9]{3}-[a-c]{4}\n", shown.out)


def test_a_table_wider_than_its_vocabulary_can_be_guided(command: Command, tmp_path: Path) -> None:
    config = qkv.preset("llama-3-8b").toy().override({"vocab_size": 320})
    qkv.TextModel(qkv.build(config), ByteTokenizer()).save(tmp_path / "m")
    shown = command("generate", str(tmp_path / "m"), "Call ", "--regex", "[0-9]{3}")
    assert re.fullmatch(r"Call [0-9]{3}\n", shown.out), shown.err


def test_the_cache_can_be_smaller(command: Command, saved: Path) -> None:
    sizes = []
    for codec in ("raw", "int8", "int4"):
        shown = command("generate", str(saved), "The ", *NINE, "--cache", codec, "--json", "--greedy")
        expected = qkv.load(saved, runtime=qkv.Runtime(codec=codec)).generate("The ", 9, decoding=qkv.Greedy())
        assert generations(shown)[0]["logprobs"] == expected.logprobs
        sizes.append(json.loads(shown.out)["usage"]["cache_bytes"])
    assert sizes == sorted(set(sizes), reverse=True)


def test_fast_is_the_other_mode(command: Command, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes = []

    def watched(lm: qkv.TextModel, *arguments: Any, **options: Any) -> list[Generation]:
        modes.append(lm.runner.deterministic)
        return generate(lm, *arguments, **options)

    generate: Callable[..., list[Generation]] = qkv.TextModel.generate
    monkeypatch.setattr(qkv.TextModel, "generate", watched)
    for option in ("--fast", "--greedy"):
        assert command("generate", str(saved), "The ", *NINE, "--json", option).code == 0
    assert modes == [False, True]


def test_rope_makes_the_context_longer(command: Command, saved: Path) -> None:
    limit = qkv.load(saved).config.max_seq_len
    long = ("generate", str(saved), "abcd", "--max-new-tokens", str(limit - 3), "--greedy")
    note = f"qkv: the model was trained on {limit} tokens at a time; what lies beyond may be poor\n"
    within = command(*long[:4], str(limit - 4), "--greedy")
    assert re.fullmatch(SUMMARY + "\n", within.err)
    beyond = command(*long)
    assert re.fullmatch(re.escape(note) + SUMMARY + "\n", beyond.err)
    stretched = command(*long, "--rope", "yarn:4")
    assert re.fullmatch(SUMMARY + "\n", stretched.err)
    expected = qkv.load(saved, rope="yarn:4").generate("abcd", limit - 3, decoding=qkv.Greedy())
    assert stretched.out == f"abcd{expected.text}\n" != beyond.out


def test_a_note_where_positions_end(command: Command, positions: Path) -> None:
    limit = qkv.load(positions).config.max_seq_len
    shown = command("generate", str(positions), "abcd", "--max-new-tokens", str(limit))
    assert shown.code == 0
    note, summary = shown.err.splitlines()
    assert note == (
        f"qkv: max_new_tokens: {limit - 4} in place of {limit}, since the model has {limit} positions and the prompt "
        "takes 4"
    )
    assert summary.startswith(f"{limit - 4} tokens in ")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--top-p", "2"), "top_p: "),
        (("--top-k", "0"), "top_k: "),
        (("--greedy", "--top-k", "3"), "--top-k: has no part in greedy decoding; leave one of them out"),
        (("--greedy", "--temperature", "1"), "--temperature: has no part in greedy decoding"),
        (("--temperature", "0", "--min-p", "0.1"), "--min-p: has no part in greedy decoding"),
        (("--beam", "2", "--repetition-penalty", "2"), "--repetition-penalty: has no part in --beam"),
        (("--beam", "2", "--stop", "x"), "Beam takes no stop strings"),
        (("--beam", "2", "--n", "2"), "--n: beam decoding finds one text"),
        (("--greedy", "--n", "2"), "--n: greedy decoding finds one text"),
        (("--n", "2", "--draft", "lookup"), "--n: samples are drawn together, without a draft"),
        (("--draft", "lokup"), "lokup: does not exist"),
        (("--stop", ""), "stop: a stop string is empty"),
        (("--rope", "yarn"), "rope: 'yarn': give the factor as a number"),
        (("--regex", "["), "regular expression: "),
        (("--json-schema", "missing.json"), "missing.json: cannot be read"),
        (("--json-schema", "broken.json"), "broken.json: not JSON"),
        (("--json-schema", "list.json"), "JSON schema: must be an object or a boolean"),
        (("--json-schema", "list.json", "--regex", "a"), "a text satisfies one of them"),
    ],
)
def test_a_mistake_is_one_line(
    command: Command,
    saved: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    problem: str,
) -> None:
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    monkeypatch.chdir(tmp_path)
    shown = command("generate", str(saved), "The ", *NINE, *options)
    assert (shown.code, shown.out) == (2, "")
    assert shown.err.startswith("qkv: ")
    assert shown.err.count("\n") == 1
    assert problem in shown.err


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ("", "prompt: empty; give at least one token to continue"),
        ("a\udcff", "the text is no UTF-8 at character 2; convert it"),
    ],
)
def test_a_prompt_is_refused_before_it_is_printed(command: Command, saved: Path, prompt: str, problem: str) -> None:
    shown = command("generate", str(saved), prompt, *NINE)
    assert (shown.code, shown.out, shown.err) == (2, "", f"qkv: {problem}\n")


def test_an_encoder_is_refused(command: Command, tmp_path: Path) -> None:
    config = qkv.preset("bert-base-uncased").toy().override({"vocab_size": 256})
    qkv.TextModel(qkv.build(config), ByteTokenizer()).save(tmp_path / "m")
    shown = command("generate", str(tmp_path / "m"), "x")
    assert shown.code == 2
    assert shown.err == "qkv: generate: needs a decoder with a language-model head, and this model has none\n"


def test_a_terminal_is_sent_no_control_characters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stream.write("a\x1b[2J\r\tb\n")
    assert capsys.readouterr().out == "a\x1b[2J\r\tb\n"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    stream.write("a\x1b[2J\r\tb\n")
    assert capsys.readouterr().out == "a·[2J·\tb\n"


def test_ctrl_c_keeps_what_there_is(saved: Path) -> None:
    program = started("generate", saved, "The ", "--greedy", "--max-new-tokens", "20000")
    shown = interrupted_after(program, 40)
    rest, errors = program.communicate(timeout=60)
    assert program.returncode == 130
    assert (shown + rest).startswith("The ")
    assert rest.endswith("\n")
    note, summary = errors.splitlines()
    assert note.startswith("qkv: the model was trained on ")
    assert re.fullmatch("interrupted: " + SUMMARY, summary)
    # The tokens are bytes, most of which are no text by themselves: the text of those counted is what was shown.
    count = int(summary.split()[1])
    expected = qkv.load(saved).generate("The ", count + 1, decoding=qkv.Greedy())
    whole = f"The {expected.text}"
    assert whole.startswith((shown + rest)[:-1])
    assert len(whole) - len(shown + rest) <= 4


def test_ctrl_c_while_samples_are_drawn(saved: Path) -> None:
    program = started("generate", saved, "The ", "--n", "2", "--max-new-tokens", "20000")
    assert program.stderr is not None
    program.stderr.readline()  # the note of length: the model has been loaded
    program.send_signal(signal.SIGINT)
    out, errors = program.communicate(timeout=60)
    assert (program.returncode, out, errors) == (130, "", "")


def test_help_names_every_choice(command: Command) -> None:
    shown = command("generate", "--help")
    for option in ("--temperature", "--top-k", "--top-p", "--min-p", "--seed", "--greedy", "--repetition-penalty",
                   "--max-new-tokens", "--stop", "--beam", "--rope", "--cache", "--fast", "--draft",
                   "--json-schema", "--regex", "--n", "--json"):  # fmt: skip
        assert f"\n  {option} " in shown.out
