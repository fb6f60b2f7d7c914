"""A new folder, all or nothing: it is filled beside its place, and takes it when it is complete.

    with whole_folder(target) as new:
        write_file(new / "model.safetensors", tensors)

Whatever goes wrong in between, an interruption included, leaves no trace: what stood at the target stays, and parents
that had to be made for it are removed again.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qkv.errors import CheckpointError


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """The folder to fill; what is at `target` is replaced, so look first whether it may be."""
    target = target.resolve()
    new, old = (target.with_name(f".{target.name}.{os.getpid()}.{what}") for what in ("new", "old"))
    made = [parent for parent in new.parents if not parent.exists()]
    complete = False
    try:
        new.mkdir(parents=True)
        yield new
        _swap(new, target, old)
        complete = True
    except OSError as error:
        raise CheckpointError(f"{target}: cannot be written ({error.strerror}); choose another folder") from None
    finally:
        shutil.rmtree(new, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
        if not complete:
            _remove_empty(made)


def _swap(new: Path, target: Path, old: Path) -> None:
    """Put `new` in its place; if that fails, what was there is there again."""
    if target.exists():
        target.rename(old)
    try:
        new.rename(target)
    except OSError:
        if old.exists():
            old.rename(target)
        raise


def _remove_empty(folders: list[Path]) -> None:
    """The innermost first; one that somebody else has put something into stays, and with it those around it."""
    for folder in folders:
        if not folder.is_dir() or any(folder.iterdir()):
            return
        folder.rmdir()
