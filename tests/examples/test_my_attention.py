"""The example of extension runs as a user runs it: one file, the package as it is."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

from qkv.checkpoint.native import WEIGHTS

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "my_attention.py"


def test_it_is_trained_saved_loaded_and_equals_its_reference(tmp_path: Path) -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 60
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    printed = subprocess.check_output(
        [sys.executable, str(EXAMPLE)], cwd=tmp_path, env=environment, text=True, timeout=120
    )
    found = re.search(r"held-out loss (\S+), .* reference error (\S+)", printed)
    assert found, printed
    loss, error = map(float, found.groups())
    assert loss < math.log(256) - 1
    assert error < 1e-5
    assert (tmp_path / "runs" / "my_attention" / "model" / WEIGHTS).is_file()
