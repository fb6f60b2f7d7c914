"""The kernels' products against NumPy, for all that this machine can run: every size of tile, block and group."""

from __future__ import annotations

import numpy as np
import pytest

import qkv
from qkv.cache.cache import Cache, Options
from qkv.cache.store import HostStore
from qkv.engine import FORMATS, Engine, Format
from qkv.engine.engine import Rows
from qkv.engine.library import kernels
from qkv.engine.packing import unpack
from qkv.engine.program import Op, Program, matrix
from qkv.errors import EngineError

from .slow import as_codes

HERE = [name for name in ("avx512", "avx2", "portable") if kernels(name)]
SIZES = [(1, 1), (16, 32), (17, 31), (40, 100), (33, 64)]

every_kernel = pytest.mark.parametrize("name", HERE)
every_form = pytest.mark.parametrize("form", FORMATS)


def product(
    x: np.ndarray, weight: np.ndarray, form: Format, name: str, *, bias: np.ndarray | None = None, threads: int = 1
) -> np.ndarray:
    """x (M, K) times the transpose of the packed weight, by the engine: the rows of x are the table of an embedding."""
    program = Program()
    read, out = program.buffer(x.shape[1]), program.buffer(weight.shape[0])
    program.do(Op.EMBED, read, x=(1.0,), p=(matrix([x], "fp32"),))
    program.linear(out, read, matrix([weight], form), bias)
    program.result = out
    each = np.arange(len(x), dtype=np.int32)
    config = qkv.preset("gpt2").toy()
    cache = Cache(config, HostStore("float32"), 1, Options(len(x)))
    rows = Rows(each, np.zeros_like(each), each, each)
    return Engine(program, threads=threads, kernels=name).run(rows, cache, cache.begin(len(x)))


@every_kernel
@every_form
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_products_are_those_of_the_unpacked_matrix(size: tuple[int, int], form: Format, name: str) -> None:
    random = np.random.default_rng(0)
    weight, bias = random.standard_normal(size).astype(np.float32), random.standard_normal(size[0]).astype(np.float32)
    meant = unpack(matrix([weight], form).data, *size, form).astype(np.float64)
    for m in range(1, 14):
        x = random.standard_normal((m, size[1])).astype(np.float32)
        read = as_codes(x) if form in ("int8", "int4") else x.astype(np.float64)
        expected = read @ meant.T + bias
        found = product(x, weight, form, name, bias=bias)
        # K sums of float32, each rounded: sqrt(K) * 2^-24 on average, K of them at most, of the terms' sizes.
        bound = (size[1] + 8) * 2**-24 * (np.abs(read) @ np.abs(meant).T + np.abs(bias)).max()
        assert np.abs(found - expected).max() <= bound, m


@every_form
def test_a_row_is_bitwise_the_same_alone_and_in_company_on_every_kernel(form: Format) -> None:
    random = np.random.default_rng(1)
    weight = random.standard_normal((35, 70)).astype(np.float32)
    x = random.standard_normal((13, 70)).astype(np.float32)
    whole = product(x, weight, form, HERE[0])
    for name in HERE:
        for threads in (1, 3):
            assert np.array_equal(product(x, weight, form, name, threads=threads), whole), (name, threads)
        assert np.array_equal(np.concatenate([product(row[None], weight, form, name) for row in x]), whole), name


@every_kernel
@every_form
def test_extreme_numbers(form: Format, name: str) -> None:
    """The largest codes on both sides, whose sums come closest to 16 bits; groups of zeros."""
    for weight in (np.full((16, 96), 3.0), np.full((16, 96), -3.0), np.zeros((16, 96))):
        weight[::2, :32] *= -1
        for x in (np.full((2, 96), 5.0), np.full((2, 96), -5.0), np.zeros((2, 96))):
            w, rows = weight.astype(np.float32), x.astype(np.float32)
            meant = unpack(matrix([w], form).data, 16, 96, form).astype(np.float64)
            expected = rows @ meant.T
            assert np.abs(product(rows, w, form, name) - expected).max() <= 1e-5 * 3 * 5 * 96


def test_kernels_that_are_not_there_are_refused() -> None:
    with pytest.raises(EngineError, match="does not run kernels 'avx9'"):
        Engine(Program(), kernels="avx9")
