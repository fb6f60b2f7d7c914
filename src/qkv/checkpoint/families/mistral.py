"""Mistral, Ministral, and Mixtral: Llama's layer with a sliding window or without, and with experts in Mixtral.

Mixtral's experts lie in the file one by one: w1 is the gate, w3 goes up, w2 down; each of our tensors stacks them all.
"""

from __future__ import annotations

from qkv.checkpoint.families.common import ACTIVATIONS, LLAMA_FRAME, LLAMA_LAYER
from qkv.checkpoint.families.llama_like import IGNORED, PRE_NORMS, RULES, TIED, Window, block, heads, uniform
from qkv.checkpoint.ops import Stack
from qkv.checkpoint.rope import Rope
from qkv.checkpoint.rules import Rule
from qkv.checkpoint.template import Family, Key

EXPERTS = {
    "kind": "mixture-of-experts",
    "n_experts": Key("num_local_experts"),
    "top_k": Key("num_experts_per_tok"),
    "d_ff": Key("intermediate_size"),
    "activation": Key("hidden_act", "silu", ACTIVATIONS),
    "score": "softmax",
    "normalize": True,
}

FAMILIES = (
    Family(
        name="mistral",
        model_types=("mistral",),
        architecture="MistralForCausalLM",
        template=uniform(block(heads(pattern=Window(absent=4096)))),
        rules=RULES,
        ignored=IGNORED,
        tied=TIED,
    ),
    Family(
        name="mixtral",
        model_types=("mixtral",),
        architecture="MixtralForCausalLM",
        template=uniform(block(heads(pattern=Window(), positions=Rope(theta=1e6)), ffn=EXPERTS)),
        rules=(
            *LLAMA_FRAME,
            *(rule for rule in LLAMA_LAYER if "mlp" not in rule.theirs[0]),
            *PRE_NORMS,
            Rule("model.layers.{i}.block_sparse_moe.gate.weight", "decoder.layers.{i}.ffn.router.weight"),
            *(
                Rule(
                    f"model.layers.{{i}}.block_sparse_moe.experts.{{e}}.{theirs}.weight",
                    f"decoder.layers.{{i}}.ffn.experts.{ours}",
                    Stack(),
                )
                for theirs, ours in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj"))
            ),
        ),
        must={"router_jitter_noise": 0.0},
        free=("output_router_logits", "router_aux_loss_coef"),  # of the training loss
        ignored=IGNORED,
        tied=TIED,
    ),
)
