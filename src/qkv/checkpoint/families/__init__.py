"""Published families as data: one file per family, each with a config template and tensor rules."""

from qkv.checkpoint.families import (
    bart,
    bert,
    big_bird,
    bloom,
    chatglm,
    deepseek,
    distilbert,
    falcon,
    gemma,
    gpt1,
    gpt2,
    gpt_neox,
    llama,
    mistral,
    mpt,
    phi3,
    qwen,
    qwen1,
    roberta,
    roformer,
    t5,
    transformer_xl,
)
from qkv.checkpoint.template import Family

FAMILIES: tuple[Family, ...] = (
    *gpt1.FAMILIES,
    *gpt2.FAMILIES,
    *bloom.FAMILIES,
    *mpt.FAMILIES,
    *llama.FAMILIES,
    *mistral.FAMILIES,
    *qwen.FAMILIES,
    *gemma.FAMILIES,
    *phi3.FAMILIES,
    *gpt_neox.FAMILIES,
    *falcon.FAMILIES,
    *deepseek.FAMILIES,
    *qwen1.FAMILIES,
    *chatglm.FAMILIES,
    *bert.FAMILIES,
    *roberta.FAMILIES,
    *distilbert.FAMILIES,
    *roformer.FAMILIES,
    *big_bird.FAMILIES,
    *t5.FAMILIES,
    *bart.FAMILIES,
    *transformer_xl.FAMILIES,
)
"""Every family; of several with one model_type the first is the default."""

__all__ = ["FAMILIES"]
