"""The oracle: every model of the configuration tree, computed the slow and obvious way. NumPy, float64, no torch.

It is written against the meaning of a forward pass in `docs/design.md` and shares no code with `qkv.nn` but the
patterns' predicates, so that the two can disagree. Read it in this order: `ops`, `position`, `codec`, `attention`,
`ffn`, `head`, `inputs`, `model`. Beside it stand two teaching texts that use none of it: `minigpt` trains by gradients
derived by hand, `flash` computes attention in tiles.

>>> import numpy as np
>>> import qkv.config as c
>>> block = c.Block(
...     attention=c.MultiHead(n_heads=4, n_kv_heads=2, head_dim=8, pattern=c.Causal(), positions=c.Rotary()),
...     ffn=c.Gated(d_ff=48), norm=c.RMSNorm(), residual=c.PreNorm())
>>> decoder = c.Stack(n_layers=2, layers=(block,), norm=c.RMSNorm())
>>> cfg = c.ModelConfig(
...     vocab_size=96, d_model=32, max_seq_len=64, decoder=decoder, head=c.LanguageModel(tied=False))
>>> forward(cfg, random_weights(cfg, seed=0), np.array([[1, 2, 3]])).shape
(1, 3, 96)
"""

from qkv.reference import attention, ffn, head
from qkv.reference.model import Output, forward, random_weights, run
from qkv.reference.position import Scheme
from qkv.reference.registry import register

__all__ = ["Output", "Scheme", "attention", "ffn", "forward", "head", "random_weights", "register", "run"]
