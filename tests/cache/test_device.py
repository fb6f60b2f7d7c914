"""Where the arrays lie: NumPy memory that torch shares, or tensors of a device, which do the same in every verb."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cache.models import (
    CODECS,
    EXACT,
    LAYOUTS,
    MODELS,
    case,
    deviations,
    even,
    model_of,
    ragged,
    read,
    text_for,
    weights_of,
)
from cache.test_verbs import go_on, rows_of, spliced
from parity.test_forward import model_with
from qkv.cache.cache import Cache, Options
from qkv.cache.store import HostStore, Store
from qkv.nn.memory import NAMES, DeviceStore, store_for, tensor

MODEL = "gemma"


def history(store: Store, codec: str, layout: str) -> tuple[list[torch.Tensor], Cache]:
    """All verbs: everything that the model said."""
    config, model = MODELS[MODEL], model_of(MODEL)
    options = Options(24, codec, slack=3, **LAYOUTS[layout])
    cache = Cache(config, store, 2, options)
    first, second = text_for(config, 20, seed=1), text_for(config, 20, seed=2)
    said = [out.logits for _, _, out in read(model, cache, first, ragged([5], [5, 4], seed=3))]
    said += [out.logits for _, _, out in go_on(cache, MODEL, first, [2])]
    fork = cache.fork()
    cache.truncate([5, 6])
    said += [out.logits for _, _, out in go_on(cache, MODEL, spliced(first, [5, 6], second), [1, 7])]
    fork.select([1, 0, 1])
    said += [out.logits for _, _, out in go_on(fork, MODEL, rows_of(first, [1, 0, 1]), [4, 1])]
    return said, fork


@pytest.mark.parametrize("layout", ["auto", "page-1", "page-3"])
@pytest.mark.parametrize("codec", CODECS)
def test_tensors_do_as_numpy_does(codec: str, layout: str) -> None:
    cpu = torch.device("cpu")
    said, cache = history(HostStore("float64"), codec, layout)
    again, other = history(DeviceStore("float64", cpu), codec, layout)
    assert all(torch.equal(one, two) for one, two in zip(said, again, strict=True))
    assert cache.nbytes == other.nbytes
    for group, twin in zip(cache.groups, other.groups, strict=True):
        for name, array in group.arrays.items():
            assert isinstance(array, np.ndarray)
            assert isinstance(twin.arrays[name], torch.Tensor)
            assert np.array_equal(array, other.store.to_numpy(twin.arrays[name]))


def test_a_file_of_a_device_is_read_on_the_host(tmp_path: object) -> None:
    _, cache = history(DeviceStore("float64", torch.device("cpu")), "int8", "page-3")
    file = f"{tmp_path}/cache.safetensors"
    cache.save(file)
    again = Cache.load(file, model_of(MODEL))
    text = rows_of(text_for(MODELS[MODEL], 20, seed=4), [1, 0, 1])
    pairs = zip(go_on(cache, MODEL, text, [1, 2]), go_on(again, MODEL, text, [1, 2]), strict=True)
    assert all(torch.equal(one[2].logits, two[2].logits) for one, two in pairs)


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("store", [HostStore, DeviceStore])
def test_every_number_format_has_a_place(dtype: torch.dtype, store: type) -> None:
    one = store(NAMES[dtype]) if store is HostStore else store(NAMES[dtype], torch.device("cpu"))
    options = Options(8)
    cache = Cache(MODELS[MODEL], one, 1, options)
    array = next(iter(cache.groups[0].arrays.values()))
    assert tensor(array).dtype == dtype
    assert cache.store.nbytes(array) == tensor(array).numel() * dtype.itemsize
    tensor(array)[0, 0, 1] = 1.5
    back = cache.store.from_numpy(cache.store.to_numpy(array))
    assert torch.equal(tensor(back), tensor(array))
    tensor(array)[0, 0, 1] = 2.5  # what was read back is a copy
    assert float(tensor(back)[0, 0, 1, 0]) == 1.5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_torch_and_numpy_share_the_host_s_memory(dtype: torch.dtype) -> None:
    """What a step of torch writes is there for NumPy, and what NumPy changes torch sees; nothing is copied."""
    config = MODELS["no-positions"]
    model = model_with(config, weights_of("no-positions"), torch.float32).to(dtype)
    assert isinstance(model.cache_store(), HostStore)
    cache = Cache.for_model(model, 1, 8)
    name = "decoder.layers.0.attention"
    before = {stream: cache.parts(name, stream)["values"] for stream in ("k", "v")}
    assert not any(array.any() for array in before.values())
    first = model(torch.tensor([[1, 2, 3]]), cache=cache).logits
    for stream, array in before.items():
        assert array is cache.parts(name, stream)["values"]
        assert array[:, :, :3].all()
        assert not array[:, :, 3:].any()
        assert tensor(array).data_ptr() == array.ctypes.data
    same = cache.fork()
    plain = model(torch.tensor([[4]]), cache=same).logits
    before["v"][:, :, 0] = 0
    changed = model(torch.tensor([[4]]), cache=cache).logits
    assert first.dtype == changed.dtype == dtype
    assert not torch.equal(plain, changed)


def test_only_floating_point_models_have_caches() -> None:
    with pytest.raises(TypeError, match=r"a cache holds floating-point numbers, not torch.int64"):
        store_for(torch.zeros(1, dtype=torch.long))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("codec", CODECS)
def test_on_a_gpu_it_is_the_same(codec: str, layout: str) -> None:
    """Quantised numbers may get another code there (`nn.codec` says why), so only raw ones are held to rounding."""
    text, truth = case(MODEL, codec)
    model = model_with(MODELS[MODEL], weights_of(MODEL), torch.float64).to("cuda")
    cache = Cache.for_model(model, 2, 24, codec, slack=2, **LAYOUTS[layout])
    assert isinstance(cache.store, DeviceStore)

    def pieces() -> object:
        for index, _ in even([5, 1, 3, 1, 1], 2):
            tokens = torch.from_numpy(np.take_along_axis(text.tokens, index, 1)).to("cuda")
            out = model(tokens, cache=cache)
            out.hidden, out.logits = out.hidden.cpu(), out.logits.cpu()
            yield index, np.ones(index.shape, np.bool_), out

    assert deviations(pieces(), truth) < (EXACT if codec == "raw" else 0.2)
    fork = cache.fork()
    fork.truncate(9)
    fork.select([1, 0])
    assert fork.nbytes == cache.nbytes
