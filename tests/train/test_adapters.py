"""Adapters: what they compute, and what merging, saving and rounding do with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import qkv
from qkv.config import training
from qkv.config.presets import preset
from qkv.config.toy import toy
from qkv.errors import ConfigError, TrainingError
from qkv.model import save
from qkv.nn import Transformer
from qkv.nn.invariant import invariant
from qkv.text import ByteTokenizer
from qkv.train.adapter_layers import Adapted, Lora, Quantised
from qkv.train.adapters import (
    activate,
    active_adapters,
    adapter_of,
    adapter_state,
    add_adapter,
    chosen_layers,
    linear_layers,
    merge,
    quantise_base,
    remove_adapter,
    unmerge,
)
from qkv.train.optimizers import make_optimizer, set_rate

from .adapted import ALL, TOKENS, apart, bits, learned, llama, logits

# --- what is computed


def test_a_new_adapter_changes_nothing_and_a_learned_one_is_the_formula() -> None:
    model = llama(torch.float64)
    before = logits(model)
    assert add_adapter(model, rank=4, targets=("q_proj",)) == [f"decoder.layers.{i}.attention.q_proj" for i in range(2)]
    assert torch.equal(logits(model), before)
    layer = linear_layers(model)["decoder.layers.1.attention.q_proj"]
    assert isinstance(layer, Adapted)
    part = layer.adapters["default"]
    part.B.weight.data.normal_()
    x = torch.randn(3, 5, layer.base.in_features, dtype=torch.float64)
    expected = x @ layer.base.weight.T + 16.0 / 4 * (x @ part.A.weight.T @ part.B.weight.T)
    assert apart(layer(x), expected) < 1e-14
    assert apart(logits(model), before) > 1e-4


def test_rslora_divides_by_the_root_of_the_rank() -> None:
    assert (Lora(16, 8.0).factor, Lora(16, 8.0, rslora=True).factor) == (0.5, 2.0)


def test_active_adapters_are_summed_and_the_others_are_silent() -> None:
    model = learned(learned(llama(torch.float64), "one"), "two", seed=8, targets=("q_proj",), rank=2)
    layer = linear_layers(model)["decoder.layers.0.attention.q_proj"]
    assert isinstance(layer, Adapted)
    x = torch.randn(4, layer.base.in_features, dtype=torch.float64)
    base, one, two = layer.base(x), layer.adapters["one"](x), layer.adapters["two"](x)
    assert active_adapters(model) == ("two",)
    for names, expected in (((), base), (("one",), base + one), (("one", "two"), base + one + two)):
        activate(model, *names)
        assert active_adapters(model) == names
        assert apart(layer(x), expected) < 1e-14
        wanted = {f"lora_{name}" for name in names}
        learning = {name.split(".")[-3] for name, p in model.named_parameters() if p.requires_grad}
        assert learning == wanted


def test_dropout_falls_on_what_a_reads_and_only_in_training() -> None:
    model = learned(llama(), dropout=0.5)
    layer = linear_layers(model)["decoder.layers.0.ffn.up_proj"]
    assert isinstance(layer, Adapted)
    x = torch.randn(64, layer.base.in_features)
    assert torch.equal(layer(x), layer(x))
    layer.train()
    torch.manual_seed(0)
    dropped = F.dropout(x, 0.5)
    torch.manual_seed(0)
    part = layer.adapters["default"]
    assert apart(layer(x), layer.base(x) + 2.0 * part.B(part.A(dropped))) < 1e-6


def test_only_the_adapter_learns_and_it_can_learn() -> None:
    model = llama()
    model.head.weight.data *= 20  # a frozen head of fresh weights can hardly tell one token from another
    add_adapter(model, rank=4, targets=ALL)
    before, parts = bits(model.state_dict()), adapter_of(model, "default")
    optimizer = make_optimizer(model.train(), training.AdamW())
    set_rate(optimizer, 1e-2)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(TOKENS[:, :-1]).logits.flatten(0, 1), TOKENS[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 2
    assert bits(model.state_dict()) == before
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for part in parts.values() for p in part.parameters()}


# --- merging


@pytest.mark.parametrize("name", ["llama-2-7b", "gpt2", "deepseek-v2", "bert-base-uncased", "t5-small"])
def test_merged_computes_the_same_and_unmerging_restores_every_bit(name: str) -> None:
    config = toy(preset(name))
    model = qkv.build(config, seed=3)
    stored = bits(model.state_dict())
    inputs = {"source": TOKENS} if len(config.stacks) == 2 else {}

    def hidden() -> Tensor:
        with torch.inference_mode():
            return model(TOKENS, **inputs).hidden.double()

    before = hidden()
    learned(model, targets=("*attention.*_proj",))
    unmerged = hidden()
    off = merge(model)
    assert max(off.values()) < 1e-7
    assert apart(hidden(), unmerged) < 1e-5
    assert apart(unmerged, before) > 1e-3
    assert model.state_dict().keys() == stored.keys()
    assert bits(model.state_dict()) != stored
    unmerge(model)
    assert bits(model.state_dict()) == stored
    assert torch.equal(hidden(), unmerged)
    remove_adapter(model, "default")
    assert bits(model.state_dict()) == stored
    assert torch.equal(hidden(), before)
    assert not any(isinstance(module, Adapted) for module in model.modules())


def test_a_bfloat16_base_merges_within_its_own_rounding() -> None:
    model = learned(llama(torch.bfloat16))
    assert {part.A.weight.dtype for part in adapter_of(model, "default").values()} == {torch.float32}
    stored = bits(model.state_dict())
    assert max(merge(model).values()) < 2**-8
    unmerge(model)
    assert bits(model.state_dict()) == stored


def test_a_merged_model_is_saved_whole_and_an_unmerged_one_as_its_base(tmp_path: Path) -> None:
    model = llama()
    before = logits(model)
    learned(model)
    unmerged = logits(model)
    save(model, tmp_path / "base")
    merge(model)
    save(model, tmp_path / "merged")
    assert torch.equal(logits(qkv.load(tmp_path / "base").model), before)
    assert apart(logits(qkv.load(tmp_path / "merged").model), unmerged) < 1e-5


def test_base_weights_are_loaded_beneath_adapters_and_not_beneath_merged_ones() -> None:
    model, other = learned(llama()), qkv.build(toy(preset("llama-2-7b")), seed=9)
    model.load_state_dict(other.state_dict())
    assert bits(model.state_dict()) == bits(other.state_dict())
    with pytest.raises(RuntimeError, match=r"q_proj\.base\.weight"):
        model.load_state_dict({name: tensor for name, tensor in other.state_dict().items() if "q_proj" not in name})
    merge(model)
    with pytest.raises(TrainingError, match="unmerge"):
        model.load_state_dict(other.state_dict())


@pytest.mark.parametrize("kept", [adapter_state, lambda model: dict(model.named_parameters())])
def test_the_tensors_of_adapters_are_kept_and_put_back(kept: Callable[[Transformer], dict[str, Tensor]]) -> None:
    model = learned(learned(llama(), "one"), "two", seed=8)
    activate(model, "one", "two")
    before, state = logits(model), {name: tensor.detach().clone() for name, tensor in kept(model).items()}
    assert sum(".lora_" in name for name in state) == 2 * 2 * 14
    for _, part in adapter_of(model, "one").items() | adapter_of(model, "two").items():
        part.A.weight.data.zero_()
        part.B.weight.data.zero_()
    assert not torch.equal(logits(model), before)
    model.load_state_dict(state, strict=False)
    assert torch.equal(logits(model), before)


def test_while_merged_nothing_learns_or_changes() -> None:
    model = learned(llama())
    merge(model)
    assert not any(p.requires_grad for p in model.parameters())
    for change in (
        lambda: merge(model),
        lambda: activate(model),
        lambda: remove_adapter(model, "default"),
        lambda: add_adapter(model, name="more"),
        lambda: quantise_base(model, "int8", ("q_proj",)),
    ):
        with pytest.raises(ConfigError, match="unmerge"):
            change()
    unmerge(model)
    assert sum(p.requires_grad for p in model.parameters()) == 2 * len(adapter_of(model, "default"))


# --- generation


@pytest.mark.parametrize("name", ["llama-2-7b", "deepseek-v2"])
@pytest.mark.parametrize("state", ["beside", "merged"])
def test_generation_with_a_cache_reads_the_adapter(name: str, state: str) -> None:
    # Latent attention multiplies the matrix of kv_up_proj itself when it has a cache.
    model = learned(qkv.build(toy(preset(name)), seed=3), targets=("*attention.*_proj",))
    if state == "merged":
        merge(model)
    whole = logits(model)
    cache = qkv.Cache(model.config, model.cache_store(), 2, qkv.cache.cache.Options(16))
    steps = [model(part, cache=cache).logits.double() for part in TOKENS.split((5, 1, 1, 5), 1)]
    assert apart(torch.cat(steps, 1), whole) < 1e-5


def test_a_text_is_generated_alike_beside_and_merged_and_unlike_the_base() -> None:
    model = llama(torch.float64)
    text = qkv.TextModel(model, ByteTokenizer())
    greedy = {"max_new_tokens": 8, "decoding": qkv.Greedy()}
    prompt = "\x01\x07\x03"
    base = text.generate(prompt, **greedy).tokens
    learned(model)
    beside = text.generate(prompt, **greedy).tokens
    merge(model)
    assert text.generate(prompt, **greedy).tokens == beside
    assert beside != base
    unmerge(model)
    activate(model)
    assert text.generate(prompt, **greedy).tokens == base


@pytest.mark.parametrize("codec", [None, "int8", "int4"])
def test_in_deterministic_mode_a_row_is_bitwise_the_row_alone(codec: str | None) -> None:
    model = llama()
    if codec is not None:
        quantise_base(model, codec, ALL)
    learned(model, rank=5)
    with torch.inference_mode(), invariant():
        together = model(TOKENS).logits
        alone = torch.cat([model(row[None]).logits for row in TOKENS])
        beginning = model(TOKENS[:, :7]).logits
    assert torch.equal(together, alone)
    assert torch.equal(together[:, :7], beginning)


# --- which layers


def test_targets_are_ends_of_names_or_patterns() -> None:
    model = llama()
    assert len(chosen_layers(model, ("q_proj",))) == 2
    assert chosen_layers(model, ("layers.1.*gate_proj",)) == ["decoder.layers.1.ffn.gate_proj"]
    assert len(chosen_layers(model, ALL)) == len(linear_layers(model)) == 14
    learned(model)
    assert len(linear_layers(model)) == 14


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda m: add_adapter(m, targets=("query",)), r"'query'.*attention\.q_proj, .*ffn\.down_proj"),
        (lambda m: add_adapter(m, targets=()), "none given"),
        (lambda m: add_adapter(m, rank=0), "rank: 0"),
        (lambda m: add_adapter(m, dropout=1.0), r"dropout: 1\.0"),
        (lambda m: add_adapter(m, alpha=float("inf")), "alpha: inf"),
        (lambda m: add_adapter(m, name="a.b"), r"'a\.b' is no name"),
        (lambda m: learned(learned(m)), "already"),
        (lambda m: activate(learned(m), "other"), "none is called 'other'; there are default"),
        (merge, "nothing to merge"),
        (lambda m: [activate(learned(m)), merge(m)], "nothing to merge"),
        (lambda m: quantise_base(m, "int3", ("q_proj",)), "'int3'.*int8, int4"),
        (lambda m: [quantise_base(m, "int8", ("q_proj",)) for _ in range(2)], "int8 codes already"),
    ],
)
def test_mistakes_are_named(act: Callable[[Transformer], object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        act(llama())


def test_stacked_experts_are_refused_and_their_neighbours_are_not() -> None:
    model = qkv.build(toy(preset("deepseek-v2")), seed=3)
    with pytest.raises(ConfigError, match=r"'gate_proj' reaches decoder\.layers\.\d+\.ffn\.experts\.gate_proj"):
        add_adapter(model, targets=("gate_proj",))
    assert all(".shared." in name for name in add_adapter(model, targets=("shared.gate_proj",)))


# --- codes


@pytest.mark.parametrize(("codec", "steps"), [("int8", 254), ("int4", 8)])
def test_a_quantised_base_merges_within_half_a_step_or_one(codec: str, steps: int) -> None:
    """A group's largest value is 127 steps of int8 and 8 of int4: off by half a step, in int4 by up to one."""
    model = llama()
    layers = quantise_base(model, codec, ALL)
    stored = bits(model.state_dict())
    learned(model)
    unmerged = logits(model)
    off = merge(model)
    assert off.keys() == set(layers)
    assert 0 < max(off.values()) <= 1 / steps * (1 + 2**-10)
    merged = logits(model)
    assert {type(model.get_submodule(f"{layer}.base")) for layer in layers} == {Quantised}
    unmerge(model)
    assert bits(model.state_dict()) == stored
    assert torch.equal(logits(model), unmerged)
    # The same as merging into the decoded matrices, and rounding the sums.
    numbers = llama()
    numbers.load_state_dict(model.state_dict())
    merge(learned(numbers))
    sums = llama()
    sums.load_state_dict(numbers.state_dict())
    quantise_base(sums, codec, ALL)
    assert torch.equal(logits(sums), merged)
    print(f"{codec}: matrices {max(off.values()):.2e}, logits {apart(merged, unmerged):.2e}")


@pytest.mark.parametrize(("codec", "share"), [("int8", 0.27), ("int4", 0.15)])
def test_codes_are_small_saved_as_numbers_and_read_again_as_the_same_codes(codec: str, share: float) -> None:
    model, again = llama(), llama()
    names = quantise_base(model, codec, ALL)
    quantise_base(again, codec, ALL)
    assert model.state_dict().keys() == llama().state_dict().keys()
    for part in (again.get_submodule(name) for name in names):
        assert isinstance(part, Quantised)
        part.codes = torch.zeros_like(part.codes)
    again.load_state_dict(model.state_dict())
    assert bits(again.state_dict()) == bits(model.state_dict())
    layer = model.get_submodule(names[0])
    held = sum(tensor.nbytes for tensor in layer.buffers())
    assert held <= share * 4 * layer.in_features * layer.out_features
    codes = layer.scales.clone()
    assert torch.equal(model.to(torch.bfloat16).get_submodule(names[0]).scales, codes)
    assert layer.weight.dtype == torch.bfloat16


def test_adapters_learn_beside_codes() -> None:
    model = llama()
    quantise_base(model, "int4", ALL)
    add_adapter(model, rank=2, targets=("q_proj", "down_proj"))
    model(TOKENS).logits.square().mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert all(".lora_default." in name for name in gradients)
    assert len(gradients) == 8
    assert all(bool(gradient.any()) for name, gradient in gradients.items() if ".B." in name)
