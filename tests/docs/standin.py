"""A tiny model with random weights under the name of a published one, so that examples run without a download."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import qkv
from qkv.checkpoint.pull import PACKAGES
from qkv.text.training import train_bpe

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def put_smollm(home: Path) -> None:
    """What `qkv pull smollm2-135m` leaves in the store at `home`."""
    words = train_bpe(["the capital of France is Paris, and so on"], 300, controls=("<|im_end|>", "<|im_start|>"))
    words.specials = replace(words.specials, chat_template=CHATML)
    config = qkv.preset("smollm2-135m").toy().override({"vocab_size": words.vocab_size, "max_seq_len": 256})
    name = PACKAGES["smollm2-135m"].parts[0].name
    (home / "smollm2-135m").mkdir(parents=True)
    qkv.TextModel(qkv.build(config, seed=0), words).save(home / "smollm2-135m" / name, format="gguf")
