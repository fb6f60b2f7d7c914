"""Caches in files: read back they go on as if nothing had been; what is damaged or another model's is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file, save_file

from cache.models import CODECS, EXACT, LAYOUTS, MODELS, case, deviations, even, model_of, ragged, read, weights_of
from cache.test_verbs import go_on, oracle, rows_of, run
from parity.test_forward import model_with
from qkv.cache.cache import Cache
from qkv.errors import CacheError

NAMES = ("gemma", "longformer-in-causal", "encoder-decoder-window", "prefix", "window-latent")
WAYS = [(name, codec, list(LAYOUTS)[(n + m) % 5]) for n, name in enumerate(NAMES) for m, codec in enumerate(CODECS)]


@pytest.mark.parametrize(("name", "codec", "layout"), WAYS)
def test_a_saved_cache_goes_on(name: str, codec: str, layout: str, tmp_path: Path) -> None:
    """Ragged rows; the original goes on, too, and knows nothing of the other."""
    text, expected = case(name, codec)
    model, file = model_of(name), tmp_path / "cache.safetensors"
    cache = Cache.for_model(model, 2, 24, codec, slack=2, **LAYOUTS[layout])
    pieces = ragged([6], [6, 5], seed=1) if text.prefix is None else even([6], 2)
    assert deviations(read(model, cache, text, pieces), expected) < EXACT
    cache.save(file)
    again = Cache.load(file, model)
    assert (again.lengths, again.nbytes, again.options) == (cache.lengths, cache.nbytes, cache.options)
    assert deviations(go_on(again, name, text, [1, 2]), expected) < EXACT
    assert deviations(go_on(cache, name, text, [3]), expected) < EXACT
    again.truncate([7, 7])
    assert deviations(go_on(again, name, text, [2]), expected) < EXACT


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [[1], [0, 1, 1, 0]])
def test_rows_that_were_chosen_anew_are_saved(layout: str, rows: list[int], tmp_path: Path) -> None:
    """Fewer rows than at first, and more of them; pools that were shared and have grown."""
    name, file = "gemma", tmp_path / "cache.safetensors"
    text, _ = case(name, "raw")
    model = model_of(name)
    cache = Cache.for_model(model, 2, 24, **LAYOUTS[layout])
    run(cache, name, text, [7])
    others = [cache.fork() for _ in range(3)]
    for other in others:
        run(other, name, text, [4])
    cache.select(rows)
    cache.save(file)
    again, text = Cache.load(file, model), rows_of(text, rows)
    expected = oracle(name, text, "raw")
    for one in (again, again.fork(), cache):
        assert deviations(go_on(one, name, text, [1, 5]), expected) < EXACT


def test_bfloat16_is_saved_to_the_bit(tmp_path: Path) -> None:
    name, file = "window-multi-query", tmp_path / "cache.safetensors"
    text, _ = case(name, "raw")
    model = model_with(MODELS[name], weights_of(name), torch.float32).to(torch.bfloat16)
    cache = Cache.for_model(model, 2, 24)
    model(torch.from_numpy(text.tokens[:, :7]), cache=cache)
    cache.save(file)
    again = Cache.load(file, model)
    new = torch.from_numpy(text.tokens[:, 7:9])
    with torch.no_grad():
        assert torch.equal(model(new, cache=cache).logits, model(new, cache=again).logits)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    file = tmp_path / "cache.safetensors"
    cache = Cache.for_model(model_of("gemma"), 2, 24)
    run(cache, "gemma", case("gemma", "raw")[0], [5])
    cache.save(file)
    return file


def test_a_file_that_was_cut_or_is_none_is_refused(saved: Path) -> None:
    whole = saved.read_bytes()
    for content in (whole[:-10], whole[:100], b"", b"no cache at all"):
        saved.write_bytes(content)
        with pytest.raises(CacheError, match=r"cache.safetensors: not a saved cache \(.*\); save one with cache.save"):
            Cache.load(saved, model_of("gemma"))
    saved.unlink()
    with pytest.raises(CacheError, match="not a saved cache"):
        Cache.load(saved, model_of("gemma"))


def test_a_file_without_all_tensors_is_refused(saved: Path) -> None:
    from safetensors import safe_open

    with safe_open(saved, "numpy") as file:
        about = file.metadata()
    tensors = load_file(saved)
    for name in ("lengths", "decoder.layers.1.attention.k.values", "groups.0.positions"):
        save_file({key: value for key, value in tensors.items() if key != name}, saved, about)
        with pytest.raises(CacheError, match=f"lacks '.*{name.split('.')[-1]}', so it is damaged; make a new cache"):
            Cache.load(saved, model_of("gemma"))


def test_another_model_is_refused(saved: Path) -> None:
    expected = "cache.safetensors: saved for another model or number format; make a new cache"
    for model in (model_of("window-multi-query"), model_of("gemma", torch.float32)):
        with pytest.raises(CacheError, match=expected):
            Cache.load(saved, model)
    save_file({"x": load_file(saved)["lengths"]}, saved)
    with pytest.raises(CacheError, match=expected):
        Cache.load(saved, model_of("gemma"))
