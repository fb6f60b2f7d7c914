"""Memory that a step frees is there for the next: no page is filled with zeros again."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

CODE = """
import resource, sys
import torch
from qkv.train.allocator import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()
for step in range(6):
    if step == 3:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    parts = [torch.ones(12 << 20) for _ in range(2)]  # 48 MB each: more than the C library keeps by itself
    del parts
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told so")
def test_pages_are_kept() -> None:
    def faults(how: str) -> int:
        done = subprocess.run([sys.executable, "-c", CODE, how], capture_output=True, text=True, check=True)
        return int(done.stdout)

    kept, freed = faults("kept"), faults("freed")
    assert kept * 10 < freed, (kept, freed)
