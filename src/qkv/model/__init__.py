"""Where the parts meet: a config becomes a model, a model with a tokenizer a `TextModel`; to disk and back.

model = build(cfg, seed=0)           a torch module with fresh weights
lm = load("runs/demo")               a saved model with its tokenizer
lm.generate("The with statement").text
"""

from qkv.generate.runners.torch import Runtime
from qkv.model.files import load, save
from qkv.model.text_model import TextModel
from qkv.model.weights import build

__all__ = ["Runtime", "TextModel", "build", "load", "save"]
