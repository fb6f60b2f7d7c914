"""A position scheme and an attention pattern in a file of your own: trained, saved, loaded, and checked."""

import shutil
from typing import Literal

import numpy as np
import torch

import qkv
from qkv import nn


@qkv.register  # each token sees itself and 1, 2, 4, 8 ... back (Li 2019); one predicate for NumPy and torch
class LogSparse(qkv.config.Pattern):
    kind: Literal["log-sparse"] = "log-sparse"
    past_only = True

    def allowed(self, query, key):
        distance = query.position - key.position
        return (distance >= 0) & (distance & (distance - 1) == 0)


class DecayModule(nn.position.Scheme):  # scores - r1 log(1 + r2 distance), r learned per head (KERPLE, Chi 2022)
    def __init__(self, config, sizes):
        super().__init__(config, sizes)
        self.r = torch.nn.Parameter(torch.empty(2, sizes.n_heads, 1, 1))

    def table(self, ctx):  # the distances, once per forward
        return (ctx.query.position[..., :, None] - ctx.key.position[..., None, :])[:, None].abs()

    def bias(self, q, k, table, scale):
        return -self.r[0].abs() * torch.log1p(self.r[1].abs() * table)


class DecayReference(qkv.reference.Scheme):  # the formula once more, for NumPy
    def bias(self, n_heads, query, key):
        r1, r2 = np.abs(self.weights["r"])
        return -r1 * np.log(1 + r2 * np.abs(np.subtract.outer(query.position, key.position)))


@qkv.register(module=DecayModule, reference=DecayReference)
class Decay(qkv.config.Positions):
    kind: Literal["decay"] = "decay"
    places = ("attention",)

    def parameters(self, sizes):
        return {"r": qkv.config.Parameter((2, sizes.n_heads, 1, 1), "ones")}


kinds = {"decoder.layers.*.attention.positions": "decay", "decoder.layers.*.attention.pattern": "log-sparse"}
cfg = qkv.preset("llama-2-7b").toy().override({"vocab_size": 256} | {path: {"kind": kinds[path]} for path in kinds})
shutil.rmtree("runs/my_attention", ignore_errors=True)
text = {"train": [__file__], "context": 64}  # it learns to write this file
run = {"run": {"steps": 60, "batch": 8, "folder": "runs/my_attention"}, "schedule": {"kind": "cosine", "peak": 3e-3}}
result = qkv.train(qkv.Recipe.from_dict({"model": {"config": cfg.to_dict()}, "data": text} | run))
model, tokens = qkv.load("runs/my_attention/model").model, torch.randint(256, (1, 40))
expected = qkv.reference.forward(cfg, {n: t.numpy() for n, t in model.state_dict().items()}, tokens.numpy())
error = np.abs(model(tokens).logits.detach().numpy() - expected).max() / np.abs(expected).max()
print(f"held-out loss {result.valid_loss:.2f}, model in runs/my_attention/model, reference error {error:.0e}")
