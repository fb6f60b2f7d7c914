"""Phi-3, Phi-3.5, Phi-4: Llama's layer with fused projections, LongRoPE, and in Phi-4-mini heads turned in part.

The queries, keys and values of all heads lie one after the other in `qkv_proj`, gate and up in `gate_up_proj`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from qkv.checkpoint.families.common import LLAMA_FRAME
from qkv.checkpoint.families.llama_like import IGNORED, PRE_NORMS, TIED, Window, block, heads, uniform
from qkv.checkpoint.ops import Split
from qkv.checkpoint.rope import Rope
from qkv.checkpoint.rules import Rule
from qkv.checkpoint.template import Family, Json, Key, Keys, Quotient
from qkv.errors import CheckpointError

_ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True)
class PhiRope(Rope):
    """Plain, or LongRoPE whose trained length is a key beside the table, and whose factor follows from the lengths."""

    fraction: str | None = "partial_rotary_factor"

    def from_parameters(self, parameters: Json, keys: Keys, fraction: float = 1.0) -> Json:
        trained = keys.get(_ORIGINAL, None)
        kind = parameters.get("type") or parameters.get("rope_type") or "default"
        if kind not in ("default", "longrope", "su"):
            raise CheckpointError(f"{keys.name}: rope_type is {kind!r}; Phi-3 has 'longrope' only")
        if kind != "default" and trained is not None:
            parameters[_ORIGINAL] = trained  # the peer takes it also where the table has another
        return super().from_parameters(parameters, keys, fraction)

    def write(self, value: Any, out: Json) -> None:
        super().write(value, out)
        scaling = value["scaling"]
        if scaling["kind"] == "none":
            return
        if scaling["kind"] != "longrope":
            raise CheckpointError(f"phi3: their format has no {scaling['kind']!r} scaling; save in qkv's own format")
        # Older releases of the peer refuse a table with more than type and factors.
        derived = scaling["factor"] == out["max_position_embeddings"] / scaling["original_max_seq_len"]
        left_out = {"rope_type", _ORIGINAL, *(("factor",) if derived else ())}
        table = {name: number for name, number in out["rope_scaling"].items() if name not in left_out}
        out["rope_scaling"] = {"type": "longrope", **table}
        out[_ORIGINAL] = scaling["original_max_seq_len"]


_ATTENTION = heads(
    head_dim=Quotient("hidden_size", "num_attention_heads"), pattern=Window(), positions=PhiRope()
)  # fmt: skip

FAMILIES = (
    Family(
        name="phi3",
        model_types=("phi3",),
        architecture="Phi3ForCausalLM",
        template=uniform(
            block(_ATTENTION, dropout=Key("resid_pdrop", 0.0)), embedding={"dropout": Key("embd_pdrop", 0.0)}
        ),
        rules=(
            *LLAMA_FRAME,
            *PRE_NORMS,
            Rule(
                "model.layers.{i}.self_attn.qkv_proj.weight",
                tuple(f"decoder.layers.{{i}}.attention.{name}_proj.weight" for name in "qkv"),
                Split(),
            ),
            Rule("model.layers.{i}.self_attn.o_proj.weight", "decoder.layers.{i}.attention.o_proj.weight"),
            Rule(
                "model.layers.{i}.mlp.gate_up_proj.weight",
                tuple(f"decoder.layers.{{i}}.ffn.{name}_proj.weight" for name in ("gate", "up")),
                Split(),
            ),
            Rule("model.layers.{i}.mlp.down_proj.weight", "decoder.layers.{i}.ffn.down_proj.weight"),
        ),
        must={"attention_bias": False, "mlp_bias": False, "lm_head_bias": False},
        free=("full_attn_mod", "interpolate_factor"),  # of other models of this code; 1 in every release
        ignored=IGNORED,
        tied=TIED,
    ),
)
