"""What every test runs under: one thread, checked shapes, and tests left out for a stated reason.

Two cores that run one test each finish sooner than one test that fights itself over two cores, so the number of threads
is set before torch or NumPy can be imported. `QKV_SHAPES` (default 1) checks the jaxtyping annotations of `qkv.nn` at
every call; the hook changes the code of the functions, which compiled graphs do not survive, so tests marked `unhooked`
run in a second process with `QKV_SHAPES=0`.
"""

import os
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import settings

for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_variable] = "1"

SHAPES_CHECKED = os.environ.get("QKV_SHAPES", "1") != "0"
if SHAPES_CHECKED:
    from jaxtyping import install_import_hook

    assert "qkv.nn" not in sys.modules, "qkv.nn was imported before its shapes could be checked"
    install_import_hook("qkv.nn", "beartype.beartype")

ROOT = Path(__file__).resolve().parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "unhooked: compiles, or measures time; runs where QKV_SHAPES=0")
    # The same examples in every run, so that it fails for a change and not by chance; more of them with --slow. No
    # deadlines: other processes share the cores.
    settings.register_profile("fast", max_examples=50, derandomize=True, deadline=None)
    settings.register_profile("slow", max_examples=500, derandomize=True, print_blob=True, deadline=None)
    settings.load_profile("slow" if config.getoption("--slow") else "fast")


def pytest_collection_modifyitems(config: pytest.Config, items: Iterable[pytest.Item]) -> None:
    reasons = {
        "slow": None if config.getoption("--slow") else "slow: run with --slow",
        "unhooked": "needs QKV_SHAPES=0" if SHAPES_CHECKED else None,
        "data": None if data_folder().is_dir() else f"no data at {data_folder()}: set QKV_DATA",
    }
    for item in items:
        for marker, reason in reasons.items():
            if reason is not None and item.get_closest_marker(marker) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish(session: pytest.Session) -> None:
    # OMP_NUM_THREADS says it to a torch that is imported later; this to one that came before us.
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


def data_folder() -> Path:
    """Where the files outside the repository lie: `QKV_DATA`, by default `data` beside the tests."""
    return Path(os.environ.get("QKV_DATA", ROOT / "data"))


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of corpora, tokenizers and checkpoints; a test that asks for it is skipped where there is none."""
    folder = data_folder()
    if not folder.is_dir():
        pytest.skip(f"no data at {folder}: set QKV_DATA")
    return folder
