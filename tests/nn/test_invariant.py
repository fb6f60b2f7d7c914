"""Deterministic mode: a row of a batch is bitwise the row alone, for every kind of decoder and every chunk schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from parity.cases import CASES, presets
from qkv import build
from qkv import config as c
from qkv.cache.cache import Cache
from qkv.errors import BackendError
from qkv.nn import Transformer, invariant
from qkv.nn.invariant import active, key_slots, self_check

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
DECODERS = {name: config for name, config in (CASES | presets()).items() if config.encoder is None}
LENGTHS = (1, 2, 3, 5, 16, 33, 61)


@pytest.fixture
def mode() -> Iterator[None]:
    """Inference in deterministic mode."""
    with torch.inference_mode(), invariant.invariant():
        yield


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Work split among two threads, on however many cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Standard normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def texts(config: c.ModelConfig, lengths: tuple[int, ...]) -> list[Tensor]:
    """One row of tokens (1, T) of each length."""
    generator = torch.Generator().manual_seed(len(lengths))
    return [torch.randint(config.vocab_size, (1, n), generator=generator) for n in lengths]


def run(model: Transformer, tokens: Tensor, **inputs: Tensor) -> Tensor:
    """Logits, or hidden states of a model without: (B, T, ...), or (B, ...) of classifiers."""
    if model.decoder is not None and any("prefix_length" in b.attention.pattern.fields for b in blocks(model)):
        inputs["prefix_length"] = torch.ones(len(tokens), dtype=torch.long)
    output = model(tokens, **inputs)
    result: Tensor = output.hidden if output.logits is None else output.logits
    return result


def blocks(model: Transformer) -> tuple[c.Block, ...]:
    """The decoder's layers."""
    assert model.config.decoder is not None
    return model.config.decoder.blocks


def reads_length(model: Transformer) -> bool:
    """Whether positions depend on how long the text is."""
    positions = [block.attention.positions for block in blocks(model)]
    return any(isinstance(one, c.Rotary) and one.scaling.reads_length for one in positions)


def together(model: Transformer, rows: list[Tensor], side: str) -> list[Tensor]:
    """What each of the rows gets in one batch, padded on that side."""
    longest = max(row.shape[1] for row in rows)
    tokens = torch.zeros(len(rows), longest, dtype=torch.long)
    valid = torch.zeros(len(rows), longest, dtype=torch.bool)
    for index, row in enumerate(rows):
        at = slice(0, row.shape[1]) if side == "right" else slice(longest - row.shape[1], longest)
        tokens[index, at], valid[index, at] = row[0], True
    out = run(model, tokens, valid=valid)
    return [one[real] if one.ndim == 2 else one for one, real in zip(out, valid, strict=True)]


def check_rows(model: Transformer, lengths: tuple[int, ...]) -> None:
    rows = texts(model.config, lengths)
    alone = [run(model, row)[0] for row in rows]
    for side in ("right", "left"):
        for one, other, length in zip(alone, together(model, rows, side), lengths, strict=True):
            assert torch.equal(one, other), f"{length} tokens in a batch padded on the {side}"


def check_prefixes(model: Transformer, length: int, prefixes: tuple[int, ...]) -> None:
    row = texts(model.config, (length,))[0]
    whole = run(model, row)[0]
    for n in prefixes:
        assert torch.equal(run(model, row[:, :n])[0], whole[:n]), f"the first {n} of {length} tokens"


@pytest.mark.parametrize("name", DECODERS)
def test_a_row_of_a_batch_is_the_row_alone(name: str, mode: None) -> None:
    config = DECODERS[name].override({"max_seq_len": 64})
    model = build(config)
    check_rows(model, LENGTHS)
    if config.head.kind == "language-model" and not reads_length(model):
        check_prefixes(model, LENGTHS[-1], LENGTHS[:-1])


def wide(dtype: torch.dtype, **changes: object) -> Transformer:
    """One layer and a head of SmolLM2-135M's widths, but fewer words."""
    attention = c.MultiHead(n_heads=9, n_kv_heads=3, head_dim=64, pattern=c.Causal(), positions=c.Rotary())
    block = c.Block(attention=attention, ffn=c.Gated(d_ff=1536), norm=c.RMSNorm(), residual=c.PreNorm())
    stack = c.Stack(n_layers=1, layers=(block.override(dict(changes)),), norm=c.RMSNorm())
    sizes = c.ModelConfig(vocab_size=500, d_model=576, max_seq_len=1024, decoder=stack, head=c.LanguageModel(tied=True))
    return build(sizes, dtype=dtype)


WIDE: dict[str, dict[str, object]] = {
    "plain": {},
    "softcap": {"attention.softcap": 4.0},
    "alibi": {"attention.positions": c.Alibi()},
    "dense": {"ffn": c.Dense(d_ff=1536, bias=True, activation="gelu")},
    "experts": {"ffn": c.MixtureOfExperts(n_experts=8, top_k=2, d_ff=384)},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", WIDE)
def test_real_widths(name: str, dtype: torch.dtype, mode: None) -> None:
    model = wide(dtype, **WIDE[name])
    check_rows(model, (1, 7, 64, 130))
    check_prefixes(model, 260, (1, 6, 64, 193))


def test_two_threads(mode: None, two_threads: None) -> None:
    check_rows(wide(torch.float32), (1, 7, 64, 130))


@pytest.mark.parametrize("name", ["no-positions", "sliding-window-sinks", "softcap", "experts-v3", "latent"])
def test_every_chunk_schedule_of_a_cache(name: str, mode: None) -> None:
    model = build(DECODERS[name])
    row = texts(model.config, (20,))[0]
    found = []
    for schedule in ([20], [1] * 20, [7, 7, 6], [2, 9, 1, 8]):
        cache = Cache.for_model(model, batch=1, max_len=20, canonical=True, slack=20)
        found.append(torch.cat([model(part, cache=cache).logits for part in torch.split(row, schedule, 1)], 1))
    assert all(torch.equal(found[0], one) for one in found)


@pytest.mark.parametrize("name", ["rotary-halves", "softcap", "dense-gelu-tanh", "experts-v2"])
def test_the_values_are_those_without_the_mode(name: str) -> None:
    model = build(DECODERS[name], dtype=torch.float64)
    row = texts(model.config, (30,))[0]
    with torch.inference_mode():
        plain = run(model, row)
        with invariant.invariant():
            ours = run(model, row)
    assert (plain - ours).abs().max() / plain.abs().max() < 1e-13


# --- functions


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [7, 33, 64, 576])
@pytest.mark.parametrize("bias", [False, True])
def test_linear(inner: int, dtype: torch.dtype, bias: bool, mode: None, two_threads: None) -> None:
    x = random(150, inner, dtype=dtype)
    for outer in (5, 32, 61, 576):
        weight, b = random(outer, inner, dtype=dtype, seed=1), random(outer, dtype=dtype) if bias else None
        whole = F.linear(x, weight, b)
        for n in (*range(1, 18), 33, 64, 100):
            for start in (0, 1, 6):
                rows = slice(start, start + n)
                assert torch.equal(F.linear(x[rows], weight, b), whole[rows]), (outer, start, n)


def test_the_forms_of_a_product(mode: None) -> None:
    a, weight, b = random(3, 1, 5, 70), random(70, 9, seed=1), random(2, 70, 11, seed=2)
    for left, right in ((a, weight), (a[0, 0], weight), (a, b), (a[0, 0], b), (a[0, 0, 0], b), (a, weight[:, 0])):
        expected = torch.from_numpy(left.double().numpy() @ right.double().numpy())
        for product in (left @ right, torch.matmul(left, right), left.matmul(right)):
            assert product.shape == expected.shape
            assert (product - expected).abs().max() < 1e-5 * expected.abs().max()
    assert torch.equal(torch.bmm(a[:2, 0], b), a[:2, 0] @ b)
    assert torch.equal(torch.mm(a[0, 0], weight), a[0, 0] @ weight)
    assert torch.equal(F.linear(a[:0], weight.T), a[:0] @ weight)


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_over_growing_keys(dtype: torch.dtype, mode: None) -> None:
    """As attention makes them: more columns in the first product, more zeros in the second, all moved to the right."""
    q, keys = random(3, 70, 64, dtype=dtype), random(3, 500, 64, dtype=dtype, seed=1)
    weights = torch.zeros(3, 70, 500, dtype=dtype)
    weights[..., :300] = random(3, 70, 300, dtype=dtype, seed=2).softmax(-1)
    scores, mixed = q @ keys.mT, weights @ keys
    for k in (1, 5, 64, 100, 257, 321):
        for n in (1, 3, 70):
            assert torch.equal(q[:, :n] @ keys[:, :k].mT, scores[:, :n, :k]), (n, k)
    for k in (300, 321, 384, 449):
        assert torch.equal(weights[..., :k] @ keys[:, :k], mixed), k
    moved = torch.cat((keys[:, 190:], keys[:, :190]), 1)
    assert torch.equal((q @ moved.mT)[..., 310:], scores[..., :190])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "groups", "width"), [(3, 3, 64), (6, 2, 6)])
def test_attention_over_any_buffer(heads: int, groups: int, width: int, dtype: torch.dtype, mode: None) -> None:
    length = 700
    q = random(1, heads, length, width, dtype=dtype)
    k, v = (random(1, groups, 1100, width, dtype=dtype, seed=seed) for seed in (1, 2))
    grouped = heads != groups
    whole = F.scaled_dot_product_attention(q, k[:, :, :length], v[:, :, :length], is_causal=True, enable_gqa=grouped)
    for start, stop in (
        (0, 1),
        (0, 64),
        (62, 63),
        (60, 64),
        (120, 191),
        (190, 192),
        (255, 256),
        (317, 320),
        (380, 700),
    ):
        for slots in {stop, -(-stop // 64) * 64, key_slots(stop, dtype), 768, 1024, 1100}:
            if slots >= stop:
                mask = torch.arange(slots) <= torch.arange(start, stop)[:, None]
                keys, values = k[:, :, :slots], v[:, :, :slots]
                out = F.scaled_dot_product_attention(q[:, :, start:stop], keys, values, mask, enable_gqa=grouped)
                assert torch.equal(out, whole[:, :, start:stop]), (start, stop, slots)


def test_attention_is_the_formula(mode: None) -> None:
    q, k, v = (random(2, heads, 9, width, dtype=torch.float64) for heads, width in ((4, 6), (2, 6), (2, 5)))
    bias = random(2, 4, 9, 9, dtype=torch.float64, seed=1)
    out = F.scaled_dot_product_attention(q, k, v, bias, scale=0.3, enable_gqa=True)
    scores = (q.view(2, 2, 2, 9, 6) @ k[:, :, None].mT).flatten(1, 2) * 0.3 + bias
    expected = (scores.softmax(-1).view(2, 2, 2, 9, 9) @ v[:, :, None]).flatten(1, 2)
    assert (out - expected).abs().max() < 1e-14


def test_key_slots() -> None:
    assert [key_slots(n, torch.float32) for n in (0, 1, 64, 65, 193, 256, 385, 512)] == [
        0, 64, 64, 128, 384, 384, 512, 512
    ]  # fmt: skip
    assert [key_slots(n, torch.float64) for n in (1, 192, 193, 513, 897)] == [192, 192, 384, 704, 1024]
    assert key_slots(700, torch.bfloat16) == 704


ELEMENTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu-tanh": lambda x: F.gelu(x, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "x.sigmoid": lambda x: x.sigmoid(),
    "tanh": torch.tanh,
    "exp": torch.exp,
    "sin": torch.sin,
    "cos": torch.cos,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elements_do_not_depend_on_their_place(name: str, dtype: torch.dtype) -> None:
    function = ELEMENTWISE[name]
    x = torch.cat((random(2000, dtype=dtype) * 4, torch.tensor([0.0, -0.0, 80.0, -80.0, 200.0, -200.0], dtype=dtype)))
    plain = function(x)
    with torch.inference_mode(), invariant.invariant():
        whole = function(x)
        for n in (1, 2, 3, 7, 8, 15, 17, 31, 33, 65, 1000):
            for start in (0, 1, 5, 13, 1003):
                part = x[start : start + n]
                assert torch.equal(function(part.clone()), whole[start : start + n]), (start, n)
        assert torch.equal(function(x.view(59, 34).T).T.flatten(), whole)
    finite = plain.isfinite()
    assert torch.equal(finite, whole.isfinite())
    # Where a form cancels, near 0 or in gelu's tail, its error is one of rounding 1.
    error = (plain - whole)[finite].abs() / plain[finite].abs().clamp(min=1)
    assert error.max() <= 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_powers_of_tensors_do_not_depend_on_their_place(dtype: torch.dtype) -> None:
    base, exponent = random(2000, dtype=dtype).abs() * 1e4 + 1, random(2000, dtype=dtype, seed=1)
    plain = base**exponent
    with torch.inference_mode(), invariant.invariant():
        whole = base**exponent
        for start, stop in ((0, 1), (3, 10), (5, 38), (17, 1017)):
            assert torch.equal(torch.pow(base[start:stop], exponent[start:stop]), whole[start:stop])
        assert torch.equal(base**2, base * base)
        assert torch.equal(2 ** torch.arange(4.0), torch.tensor([1.0, 2.0, 4.0, 8.0]))
    # The exponent of exp is rounded, so that a relative error is as large as that exponent.
    error = (plain - whole).abs() / plain
    assert (error <= 2 * torch.finfo(dtype).eps * (1 + (exponent * base.log()).abs())).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax_sums_what_is_there(dtype: torch.dtype) -> None:
    x = random(5, 90, dtype=dtype) * 3
    plain = x.softmax(-1)
    with torch.inference_mode(), invariant.invariant():
        alone = x.softmax(-1)
        for gaps in ((0, 3), (20, 1), (90, 70), (33, 64)):
            at, size = gaps
            spread = torch.cat((x[:, :at], torch.full((5, size), -torch.inf, dtype=dtype), x[:, at:]), 1)
            for found in (spread.softmax(-1), torch.softmax(spread, 1), F.softmax(spread.T, 0).T):
                assert torch.equal(torch.cat((found[:, :at], found[:, at + size :]), 1), alone)
                assert not found[:, at : at + size].any()
        assert torch.full((2, 3), -torch.inf).softmax(-1).isnan().all()
        assert x.softmax(-1, dtype=torch.float64).dtype == torch.float64
    assert (plain - alone).abs().max() <= 4 * torch.finfo(dtype).eps


# --- what it refuses, and the check


def test_gradients_devices_and_other_products_are_refused() -> None:
    x, weight = random(3, 8), random(4, 8)
    with invariant.invariant(), pytest.raises(BackendError, match="inference only"):
        F.linear(x, weight)
    with torch.no_grad(), invariant.invariant():
        with pytest.raises(BackendError, match="not on meta"):
            F.linear(x.to("meta"), weight.to("meta"))
        with pytest.raises(BackendError, match="not covered"):
            torch.einsum("nk,mk->nm", x, weight)
        with pytest.raises(BackendError, match="no dropout"):
            F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None], dropout_p=0.5)
        assert F.linear(x, weight).shape == (3, 4)


def test_active() -> None:
    assert not active()
    with invariant.invariant():
        assert active()
        with torch.inference_mode(), invariant.invariant():
            assert active()
    assert not active()


@pytest.mark.unhooked
def test_a_compiled_model_runs_uncompiled() -> None:
    model = build(DECODERS["rotary-halves"])
    row = texts(model.config, (8,))[0]
    with torch.inference_mode(), invariant.invariant():
        assert torch.equal(torch.compile(model, backend="eager")(row).logits, run(model, row))


WIDTHS = ((576, 576), (576, 1536), (1536, 576), (576, 49152))


@pytest.mark.parametrize("dtype", DTYPES)
def test_this_processor_keeps_the_promise(dtype: torch.dtype) -> None:
    assert self_check(dtype, WIDTHS) is None
    assert self_check(dtype, [(7, 5), (33, 61)], head_dim=6) is None


def test_the_check_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = random(64, 576), random(1536, 576, seed=1)
    depends = any(not torch.equal(F.linear(x[:n], weight), F.linear(x, weight)[:n]) for n in (1, 2, 3, 5))
    monkeypatch.setattr(invariant, "ROWS", 1)
    said = self_check(torch.float32, WIDTHS)
    assert (said is not None and "a product from 576 to 1536" in said and "float32" in said) == depends
    monkeypatch.undo()
    monkeypatch.setitem(invariant._REPLACED, F.silu, lambda x, inplace: x + x.numel())
    assert self_check(torch.float32, WIDTHS) == "in float32 a row depends on the number of rows or its place, in silu"
