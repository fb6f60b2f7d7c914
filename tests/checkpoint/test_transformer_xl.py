"""Transformer-XL, which the pinned peer library no longer has.

Two sources stand in for it. `TransfoXl` is a transcription: a minimal forward pass in plain torch, written for this
test by reading the modelling code of `transformers` 4.35.2, with that code's tensor names, its shifted sums over
distances and its memory; it shares nothing with qkv. `RECORDED` are numbers which that release itself computed, once.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import qkv
from checkpoint.harness import VOCAB, Peer, batch, check, deviation, load_ours, our_logits, randomised
from qkv.checkpoint.huggingface import read_config, read_model, write_config
from qkv.config import ModelConfig, SlidingWindow
from qkv.errors import CheckpointError

from .as_family import family
from .test_without_peer import Published

Settings = dict[str, Any]

# config.json of transfo-xl-wt103, and the same at a size for tests, read whole.
WT103 = {
    "adaptive": True, "architectures": ["TransfoXLLMHeadModel"], "attn_type": 0, "clamp_len": 1000,
    "cutoffs": [20000, 40000, 200000], "d_embed": 1024, "d_head": 64, "d_inner": 4096, "d_model": 1024, "div_val": 4,
    "dropatt": 0.0, "dropout": 0.1, "eos_token_id": 0, "ext_len": 0, "init": "normal", "init_range": 0.01,
    "init_std": 0.02, "layer_norm_epsilon": 1e-05, "mem_len": 1600, "model_type": "transfo-xl", "n_head": 16,
    "n_layer": 18, "pre_lnorm": False, "proj_init_std": 0.01, "same_length": True, "sample_softmax": -1,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 250}}, "tgt_len": 128,
    "tie_projs": [False, True, True, True], "tie_weight": True, "untie_r": True, "vocab_size": 267735,
}  # fmt: skip
SMALL = WT103 | {
    "clamp_len": -1, "cutoffs": [20, 40], "d_embed": 32, "d_head": 8, "d_inner": 48, "d_model": 32, "div_val": 2,
    "mem_len": 0, "n_head": 4, "n_layer": 3, "same_length": False, "tie_projs": [False, True, True],
    "vocab_size": VOCAB,
}  # fmt: skip


class TransfoXl(Published):
    """TransfoXLLMHeadModel: everything as (position, batch, head, element), the last position first in `r`."""

    @staticmethod
    def tied(config: Settings) -> bool:
        """The first releases called it `tie_weight`."""
        tied: bool = config.get("tie_word_embeddings", config.get("tie_weight", True))
        return tied

    @staticmethod
    def edges(config: Settings) -> list[int]:
        return [0, *config["cutoffs"], config["vocab_size"]]

    @staticmethod
    def shapes(config: Settings) -> dict[str, tuple[int, ...]]:
        d, heads, inner = config["d_model"], config["n_head"] * config["d_head"], config["d_inner"]
        edges, single = TransfoXl.edges(config), config["div_val"] == 1
        sizes = [stop - start for start, stop in itertools.pairwise(edges)]
        widths = [d // config["div_val"] ** i for i in range(len(sizes))]
        if single:
            sizes, widths = [config["vocab_size"]], [d]
        clusters = len(config["cutoffs"])
        shapes: dict[str, tuple[int, ...]] = {"crit.cluster_weight": (clusters, d), "crit.cluster_bias": (clusters,)}
        for i, (size, width) in enumerate(zip(sizes, widths, strict=True)):
            shapes[f"transformer.word_emb.emb_layers.{i}.weight"] = (size, width)
            shapes[f"crit.out_layers.{i}.bias"] = (size,)
            if not TransfoXl.tied(config):
                shapes[f"crit.out_layers.{i}.weight"] = (size, width)
            if not single:
                shapes[f"transformer.word_emb.emb_projs.{i}"] = (d, width)
            if not single and not config["tie_projs"][i]:
                shapes[f"crit.out_projs.{i}"] = (d, width)
        for i in range(config["n_layer"]):
            layer = {
                "dec_attn.qkv_net.weight": (3 * heads, d), "dec_attn.o_net.weight": (d, heads),
                "dec_attn.r_net.weight": (heads, d), "dec_attn.r_r_bias": (config["n_head"], config["d_head"]),
                "dec_attn.r_w_bias": (config["n_head"], config["d_head"]), "pos_ff.CoreNet.0.weight": (inner, d),
                "pos_ff.CoreNet.0.bias": (inner,), "pos_ff.CoreNet.3.weight": (d, inner), "pos_ff.CoreNet.3.bias": (d,),
            }  # fmt: skip
            layer |= {f"{n}.layer_norm.{k}": (d,) for n in ("dec_attn", "pos_ff") for k in ("weight", "bias")}
            shapes |= {f"transformer.layers.{i}.{name}": shape for name, shape in layer.items()}
        return shapes

    def embedded(self, tokens: Tensor) -> Tensor:
        """Each token's row, through its cluster's projection, times sqrt(d_model)."""
        named, config = dict(self.named_parameters()), self.config
        if config["div_val"] == 1:
            return named["transformer.word_emb.emb_layers.0.weight"][tokens] * config["d_model"] ** 0.5
        out = torch.zeros(*tokens.shape, config["d_model"])
        edges = self.edges(config)
        for i, (start, stop) in enumerate(itertools.pairwise(edges)):
            inside = (tokens >= start) & (tokens < stop)
            rows = named[f"transformer.word_emb.emb_layers.{i}.weight"][tokens[inside] - start]
            out[inside] = F.linear(rows, named[f"transformer.word_emb.emb_projs.{i}"])
        return out * config["d_model"] ** 0.5

    def norm(self, x: Tensor, name: str) -> Tensor:
        named = dict(self.named_parameters())
        weight, bias = (named[f"{name}.layer_norm.{kind}"] for kind in ("weight", "bias"))
        return F.layer_norm(x, x.shape[-1:], weight, bias, self.config["layer_norm_epsilon"])

    def attention(self, x: Tensor, memory: Tensor, name: str) -> Tensor:
        named, config, pre = dict(self.named_parameters()), self.config, self.config["pre_lnorm"]
        seen = torch.cat((memory, x))
        q, k, v = self.linear(self.norm(seen, name) if pre else seen, f"{name}.qkv_net").chunk(3, -1)
        shape = (config["n_head"], config["d_head"])
        q, k, v = q[-len(x) :].unflatten(-1, shape), k.unflatten(-1, shape), v.unflatten(-1, shape)
        distance = torch.arange(len(seen) - 1, -1, -1.0)
        if config["clamp_len"] > 0:
            distance = distance.clamp(max=config["clamp_len"])
        angle = torch.outer(distance, 1 / 10_000 ** (torch.arange(0, x.shape[-1], 2.0) / x.shape[-1]))
        waves = torch.cat((angle.sin(), angle.cos()), -1)
        r = self.linear(waves, f"{name}.r_net").unflatten(-1, shape)
        by_content = torch.einsum("qbhf,kbhf->bhqk", q + named[f"{name}.r_w_bias"], k)
        by_distance = torch.einsum("qbhf,khf->bhqk", q + named[f"{name}.r_r_bias"], r)
        for row in range(len(x)):  # the last key of the last query has distance 0; each query before it, one less far
            by_distance[:, :, row] = by_distance[:, :, row].roll(row + 1 - len(x), -1)
        scores = (by_content + by_distance) / config["d_head"] ** 0.5
        here, there = torch.arange(len(x))[:, None] + len(memory), torch.arange(len(seen))[None]
        visible = there <= here
        if config["same_length"]:
            visible &= there > here - config["mem_len"]
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        out = x + self.linear(torch.einsum("bhqk,kbhf->qbhf", weights, v).flatten(-2), f"{name}.o_net")
        return out if pre else self.norm(out, name)

    def network(self, x: Tensor, name: str) -> Tensor:
        hidden = self.linear(self.norm(x, name) if self.config["pre_lnorm"] else x, f"{name}.CoreNet.0").relu()
        out = x + self.linear(hidden, f"{name}.CoreNet.3")
        return out if self.config["pre_lnorm"] else self.norm(out, name)

    def cluster(self, hidden: Tensor, i: int) -> Tensor:
        """Logits inside a cluster; the first has an entry for each other one behind its tokens."""
        named, config, edges = dict(self.named_parameters()), self.config, self.edges(self.config)
        matrices = "transformer.word_emb.emb_layers" if self.tied(config) else "crit.out_layers"
        if config["div_val"] == 1:
            part = slice(edges[i], edges[i + 1])
            rows, bias = named[f"{matrices}.0.weight"][part], named["crit.out_layers.0.bias"][part]
        else:
            rows, bias = named[f"{matrices}.{i}.weight"], named[f"crit.out_layers.{i}.bias"]
            tied = config["tie_projs"][i]
            hidden = hidden @ named[f"transformer.word_emb.emb_projs.{i}" if tied else f"crit.out_projs.{i}"]
        if i == 0:
            rows, bias = torch.cat((rows, named["crit.cluster_weight"])), torch.cat((bias, named["crit.cluster_bias"]))
        return F.linear(hidden, rows, bias).log_softmax(-1)

    def log_probabilities(self, hidden: Tensor) -> Tensor:
        first, frequent = self.cluster(hidden, 0), self.config["cutoffs"][0]
        tails = range(1, len(self.config["cutoffs"]) + 1)
        rare = [first[..., frequent + i - 1, None] + self.cluster(hidden, i) for i in tails]
        return torch.cat((first[..., :frequent], *rare), -1)

    def read(self, tokens: Tensor, lengths: list[int]) -> Tensor:
        """Log-probabilities of a text in segments of these lengths; each leaves its hidden states as memory."""
        n_layers, kept = self.config["n_layer"], self.config["mem_len"]
        memory = [torch.zeros(0, len(tokens), self.config["d_model"])] * n_layers
        parts = []
        for segment in tokens.split(lengths, 1):
            x = self.embedded(segment.T)
            for i in range(n_layers):
                seen = torch.cat((memory[i], x))
                old, memory[i] = memory[i], seen[max(0, len(seen) - kept) :]
                x = self.attention(x, old, f"transformer.layers.{i}.dec_attn")
                x = self.network(x, f"transformer.layers.{i}.pos_ff")
            parts.append(self.log_probabilities(x).transpose(0, 1))
        return torch.cat(parts, 1)

    def forward(self, tokens: Tensor, valid: Tensor) -> Tensor:
        """Padding, which may follow only, is a text's continuation that no earlier position sees."""
        return self.read(tokens, [tokens.shape[1]])


def xl(**changes: Any) -> Peer:
    return Peer(lambda: TransfoXl(SMALL | changes), lambda peer, tokens, valid: peer(tokens, valid), our_logits)


WINDOW = {"same_length": True, "mem_len": 6}
PEERS = {
    "clusters": xl(),
    "clamped": xl(div_val=4, clamp_len=5),
    "one-table": xl(div_val=1),
    "one-table-untied": xl(div_val=1, tie_weight=False, clamp_len=3),
    "untied": xl(tie_weight=False),
    "own-projections": xl(tie_projs=[False, False, False], proj_share_all_but_first=False),
    "every-projection-tied": xl(tie_projs=[True, True, True]),
    "one-projection-tied": xl(tie_projs=[False, True, False]),
    "one-cutoff": xl(cutoffs=[50], tie_projs=[False, True]),
    "pre-norm": xl(pre_lnorm=True, layer_norm_epsilon=1e-3),
    "wide-heads": xl(d_head=12),
    "window": xl(**WINDOW),
    "window-one-table": xl(**WINDOW, div_val=1, clamp_len=4),
}


@pytest.mark.parametrize("name", PEERS)
def test_equals_the_transcription_both_ways(name: str, tmp_path: Path) -> None:
    check(PEERS[name], tmp_path)


# What transformers 4.35.2 computed for these settings: weights by `numbered`, tokens by `counted`, an empty memory.
RECORDED: dict[str, tuple[Settings, list[float]]] = {
    "clusters": (
        {"clamp_len": 5},
        [-10.58499, -4.75529, -7.96512, -14.43936, -11.3416, -8.78918, -11.4004, -15.19728],
    ),
    "one-table": (
        {"div_val": 1, "pre_lnorm": True},
        [-4.66924, -20.45528, -39.05209, -24.26961, -50.38605, -5.76358, -11.09573, -43.67204],
    ),
    "untied-window": (
        {"tie_weight": False, "tie_projs": [True, False, True], **WINDOW},
        [-7.31085, -8.8182, -16.95512, -9.13691, -14.68993, -7.3032, -17.67746, -8.50287],
    ),
}
PLACES = ((0, 0, 0), (0, 5, 3), (0, 12, 30), (1, 12, 95), (1, 7, 60), (1, 12, 19), (0, 9, 39), (0, 12, 40))


def numbered(model: nn.Module) -> nn.Module:
    """The n-th parameter in the order of names from the n-th random stream."""
    for index, (name, parameter) in enumerate(sorted(model.named_parameters())):
        drawn = np.random.default_rng(index).uniform(-0.5, 0.5, tuple(parameter.shape))
        centre = 1 if name.endswith("layer_norm.weight") else 0
        parameter.data = torch.from_numpy((drawn + centre).astype(np.float32))
    return model


@pytest.mark.parametrize("name", RECORDED)
def test_equals_what_the_older_release_computed(name: str, tmp_path: Path) -> None:
    changes, expected = RECORDED[name]
    theirs = numbered(TransfoXl(SMALL | {"n_layer": 2} | changes))
    tokens = (torch.arange(26) * 37 % VOCAB).view(2, 13)
    theirs.save_pretrained(tmp_path)  # type: ignore[operator]
    _, _, ours = load_ours(tmp_path)
    valid = torch.ones_like(tokens, dtype=torch.bool)
    with torch.no_grad():
        for found in (theirs(tokens, valid), our_logits(ours, tokens, valid)):
            assert [float(found[place]) for place in PLACES] == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_a_window_is_what_segments_with_a_memory_see(tmp_path: Path) -> None:
    theirs = randomised(TransfoXl(SMALL | WINDOW))
    assert isinstance(theirs, TransfoXl)
    theirs.save_pretrained(tmp_path)
    _, _, ours = load_ours(tmp_path)
    tokens, valid = batch("none")
    with torch.no_grad():
        found = our_logits(ours, tokens, valid)
        for lengths in ([5, 1, 7], [1] * 13, [13]):
            assert deviation(theirs.read(tokens, lengths), found, valid) < 1e-4
        causal = TransfoXl(SMALL)
        causal.load_state_dict(theirs.state_dict())
        assert deviation(causal(tokens, valid), found, valid) > 1e-2


def test_a_file_holds_either_name_of_a_tied_tensor_or_both(tmp_path: Path) -> None:
    randomised(TransfoXl(SMALL)).save_pretrained(tmp_path)  # type: ignore[operator]
    _, expected = read_model(tmp_path)
    expected = {name: np.array(value) for name, value in expected.items()}
    file = tmp_path / "model.safetensors"
    held = load_file(file)
    embedding = "transformer.word_emb.emb"
    names = {f"{embedding}_layers.{i}.weight": f"crit.out_layers.{i}.weight" for i in range(3)}
    names |= {f"{embedding}_projs.{i}": f"crit.out_projs.{i}" for i in (1, 2)}
    both = held | {copy: held[name].clone() for name, copy in names.items()}
    swapped = {name: value for name, value in both.items() if name not in names}
    for tensors in (both, swapped):
        save_file(tensors | {"transformer.pos_emb.inv_freq": torch.ones(16)}, file)
        _, found = read_model(tmp_path)
        assert set(found) == set(expected)
        assert all(np.array_equal(found[name], expected[name]) for name in expected)
    save_file(both | {"crit.out_projs.2": both["crit.out_projs.2"] + 1}, file)
    with pytest.raises(CheckpointError, match=r"crit\.out_projs\.2 is tied to .*emb_projs\.2 by the config, but diff"):
        read_model(tmp_path)
    del both["crit.out_projs.0"]
    save_file(both, file)
    with pytest.raises(CheckpointError, match=r"crit\.out_projs\.0 is missing"):
        read_model(tmp_path)


def without_training(config: ModelConfig, length: int) -> ModelConfig:
    """What does not show in a forward pass of a whole text, alike."""
    same: Settings = {"max_seq_len": length, "embedding.dropout": 0.0, "decoder.layers.*.dropout": 0.0}
    same |= {"decoder.layers.*.attention.dropout": 0.0, "decoder.layers.*.ffn.dropout": 0.0}
    return config.override({**same, "decoder.layers.*.attention.pattern": {"kind": "causal"}})


def test_the_published_config_is_the_preset() -> None:
    preset, found = qkv.preset("transformer-xl-wt103"), read_config(WT103)
    assert found.decoder is not None
    assert found.decoder.block(0).attention.pattern == SlidingWindow(window=1600)
    assert without_training(found.override({"init": preset.init}), 768) == without_training(preset, 768)
    assert found.n_parameters == preset.n_parameters == 285_205_322


def test_newer_files_say_the_same_in_other_words() -> None:
    newer = {key: value for key, value in WT103.items() if key not in ("tie_projs", "tie_weight", "ext_len", "tgt_len")}
    assert read_config(newer | {"proj_share_all_but_first": True, "tie_word_embeddings": True}) == read_config(WT103)
    assert read_config(newer) == read_config(WT103)
    written = write_config(read_config(WT103), family("transformer-xl"))
    kept = {key: value for key, value in WT103.items() if key in written}
    assert {key: written[key] for key in kept} == kept


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"untie_r": False}, "untie_r is False"),
        ({"attn_type": 2}, "attn_type is 2"),
        ({"d_embed": 512}, "d_embed is 512, but must equal d_model"),
        ({"same_length": True, "mem_len": 0}, "same_length needs a mem_len of 1 or more"),
        ({"cutoffs": []}, "cutoffs: must be increasing and not empty"),
        ({"tie_word_embeddings": False}, "name the same thing and must be equal"),
        ({"tie_projs": [False] * 5}, "tied_projections: has 5 values for 4 clusters"),
        ({"n_layers": 3}, "n_layers (3) is not understood"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(changes: Settings, message: str) -> None:
    with pytest.raises(CheckpointError) as error:
        read_config(WT103 | changes)
    assert message in str(error.value)
