"""KV cache bytes: exact figures of published models, and counted another way for every case."""

from __future__ import annotations

import pytest

from parity.cases import CASES
from qkv.cache.spec import stored
from qkv.config import Coordinates, ModelConfig
from qkv.config.presets import preset
from qkv.plan import kv_cache_bytes

GIB = 2**30


@pytest.mark.parametrize(
    ("name", "context", "expected"),
    [
        ("llama-2-7b", 4096, 2_147_483_648),  # the 2.0 GiB of the teaching text's question 4
        ("llama-2-7b", 1, 524_288),
        ("llama-2-70b", 4096, 1_342_177_280),
        ("llama-3-8b", 8192, 1 * GIB),
        ("llama-3-8b", 131_072, 16 * GIB),
        ("llama-3-405b", 131_072, 63 * GIB),
        ("mistral-7b", 4096, GIB // 2),
        ("mistral-7b", 100_000, GIB // 2),  # its window keeps it there
        ("qwen2-7b", 32_768, 7 * GIB // 4),
        ("chatglm2-6b", 32_768, 7 * GIB // 8),
        ("gpt-3-175b", 2048, 9 * GIB),
        ("palm-540b", 1, 120_832),
        ("deepseek-v2", 1, 69_120),
        ("deepseek-v3", 1, 70_272),
        ("bert-base-uncased", 512, 0),
    ],
)
def test_published_models_in_16_bits(name: str, context: int, expected: int) -> None:
    assert kv_cache_bytes(preset(name), context) == expected


def test_without_groups_llama_2_70b_would_need_10_gib() -> None:
    config = preset("llama-2-70b").override({"decoder.layers.*.attention.n_kv_heads": 64})
    assert kv_cache_bytes(config, 4096) == 10 * GIB


def test_rows_element_size_and_source_multiply() -> None:
    config = preset("transformer-base")
    own = 6 * 2 * 512 * 10 * 2
    assert kv_cache_bytes(config, 10) == own
    assert kv_cache_bytes(config, 10, source=7) == own + 6 * 2 * 512 * 7 * 2
    assert kv_cache_bytes(config, 10, source=7, batch=3, bytes_per_element=4) == 6 * kv_cache_bytes(
        config, 10, source=7
    )


@pytest.mark.parametrize("name", [name for name, config in CASES.items() if config.decoder is not None])
def test_slots_hold_every_key_that_the_last_query_sees(name: str) -> None:
    """Brute force: the keys that the predicate shows to the newest query, and no fewer slots than those."""
    config, context = CASES[name], 29
    assert config.decoder is not None
    last = Coordinates(context - 1, None, False, 0, context)
    for block, kept in zip(config.decoder.blocks, _own(config, context), strict=True):
        pattern = block.attention.pattern
        seen = sum(bool(pattern.allowed(last, Coordinates(k, None, False, 0, context))) for k in range(context))
        assert kept is not None
        assert seen <= kept <= context
        if pattern.kind in ("causal", "sliding-window"):
            assert seen == kept


def _own(config: ModelConfig, context: int) -> list[int | None]:
    return [one.retention.slots(context) for one in stored(config) if not one.cross]


def test_a_window_costs_the_same_at_every_length_beyond_it() -> None:
    config = preset("mistral-7b")
    assert kv_cache_bytes(config, 4095) < kv_cache_bytes(config, 4096) == kv_cache_bytes(config, 1_000_000)


def test_gemmas_cycle_keeps_its_global_layers_growing() -> None:
    config = preset("gemma-3-270m")
    growth = kv_cache_bytes(config, 10_001) - kv_cache_bytes(config, 10_000)
    assert growth == 3 * 2 * 256 * 2  # three of eighteen layers see everything: one head of 256, keys and values


def test_show_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    from qkv.cli import app

    app(["show", "llama-3-8b"], standalone_mode=False)
    assert "KV cache in 16 bits 131,072 bytes a token, 1,073,741,824 at 8,192" in capsys.readouterr().out
    app(["show", "bert-base-uncased"], standalone_mode=False)
    assert "KV cache" not in capsys.readouterr().out
