"""`qkv translate` with a small T5: greedy, beam, lines of standard input; what is no encoder-decoder is refused."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import qkv
from qkv.text.folder import write_folder
from qkv.text.training import train_bpe

from .helpers import Result
from .programs import interrupted_after, started

transformers = pytest.importorskip("transformers")

Command = Callable[..., Result]

TEXTS = ("the cat sat", "on the mat and", "said hello")
LENGTH = ("--max-new-tokens", "8")


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The peer's T5 with random weights, large enough that its choices differ, and a vocabulary."""
    folder = tmp_path_factory.mktemp("t5") / "m"
    words = train_bpe(["the cat sat on the mat and said hello"] * 4, 290, controls=("</s>", "<pad>"))
    config = transformers.T5Config(
        vocab_size=words.vocab_size, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
        eos_token_id=words.specials.eos, pad_token_id=1, decoder_start_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    assert write_folder(folder, words)
    return folder


def test_each_text_is_a_line(command: Command, t5: Path) -> None:
    expected = [one.text for one in qkv.load(t5).generate(list(TEXTS), 8, decoding=qkv.Greedy())]
    assert len(set(expected)) == len(TEXTS)
    shown = command("translate", str(t5), *TEXTS, *LENGTH)
    assert shown.code == 0, shown.err
    assert shown.out == "".join(f"{text}\n" for text in expected)
    assert re.fullmatch(r"\d+ tokens in .* \(.* tokens/s\), the first after .* s; cache [\d,]+ bytes\n", shown.err)


def test_the_peer_says_the_same(command: Command, t5: Path) -> None:
    model = transformers.T5ForConditionalGeneration.from_pretrained(t5).eval()
    words = qkv.load(t5).tokenizer
    assert words is not None
    found = json.loads(command("translate", str(t5), *TEXTS, *LENGTH, "--json").out)["generations"]
    for text, one in zip(TEXTS, found, strict=True):
        read = torch.tensor([words.encode(text)])
        written = model.generate(read, max_new_tokens=8, num_beams=1, do_sample=False, decoder_start_token_id=1)
        assert one["tokens"] == written[0, 1:].tolist()


def test_a_beam(command: Command, t5: Path) -> None:
    lm = qkv.load(t5)
    expected = [lm.generate(text, 8, decoding=qkv.Beam(width=4)) for text in TEXTS]
    shown = command("translate", str(t5), *TEXTS, *LENGTH, "--beam", "4")
    assert shown.out == "".join(f"{one.text}\n" for one in expected)
    assert shown.err.startswith(f"{sum(len(one.tokens) for one in expected)} tokens in ")
    assert expected[0].tokens != lm.generate(TEXTS[0], 8, decoding=qkv.Greedy()).tokens


def test_lines_of_standard_input(command: Command, t5: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (
        one.text for one in qkv.load(t5).generate(["to: the cat sat", "to: said hello"], 8, decoding=qkv.Greedy())
    )
    monkeypatch.setattr("sys.stdin", io.StringIO("the cat sat\r\n\nsaid hello"))
    shown = command("translate", str(t5), *LENGTH, "--prefix", "to: ")
    assert shown.out == f"{first}\n\n{second}\n"


def test_json(command: Command, t5: Path) -> None:
    expected = qkv.load(t5).generate(list(TEXTS), 8, decoding=qkv.Greedy())
    found = json.loads(command("translate", str(t5), *TEXTS, *LENGTH, "--json").out)["generations"]
    assert found == [{"prompt": text, "sample": 0, **vars(one)} for text, one in zip(TEXTS, expected, strict=True)]


def test_generate_shows_the_answer_alone(command: Command, t5: Path) -> None:
    expected = qkv.load(t5).generate(TEXTS[0], 8, decoding=qkv.Greedy()).text
    assert command("generate", str(t5), TEXTS[0], *LENGTH, "--greedy").out == f"{expected}\n"


@pytest.mark.parametrize("preset", ["llama-3-8b", "bert-base-uncased"])
def test_one_stack_is_refused(command: Command, tmp_path: Path, preset: str) -> None:
    config = qkv.preset(preset).toy().override({"vocab_size": 256})
    qkv.TextModel(qkv.build(config), qkv.text.ByteTokenizer()).save(tmp_path / "m")
    shown = command("translate", str(tmp_path / "m"), "hello")
    assert (shown.code, shown.out) == (2, "")
    assert shown.err == (
        f"qkv: {tmp_path / 'm'}: translating needs an encoder-decoder, and this model has one stack; "
        "see `qkv generate`\n"
    )


def test_a_text_that_is_none(command: Command, t5: Path) -> None:
    shown = command("translate", str(t5), "a\udcff")
    assert (shown.code, shown.out, shown.err) == (2, "", "qkv: the text is no UTF-8 at character 2; convert it\n")


def test_ctrl_c(t5: Path) -> None:
    program = started("translate", t5, *TEXTS, "--max-new-tokens", "20000")
    shown = interrupted_after(program, 30)
    rest, errors = program.communicate(timeout=60)
    assert program.returncode == 130
    assert errors.startswith("interrupted: ")
    assert (shown + rest).count("\n") == 1
