"""Running a command as a process of its own, which can be sent Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

# A shell starts background jobs with the interrupt ignored; here it is as in a terminal.
_CODE = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from qkv.cli import main
sys.argv = ["qkv", *sys.argv[1:]]
main()
"""


def started(*arguments: str | Path) -> subprocess.Popen[str]:
    """`qkv ARGUMENTS`, with pipes."""
    return subprocess.Popen(
        [sys.executable, "-c", _CODE, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"},
        encoding="utf-8",
    )


def interrupted_after(program: subprocess.Popen[str], characters: int) -> str:
    """Read so much of its output, then send Ctrl-C; what was read."""
    assert program.stdout is not None
    read = program.stdout.read(characters)
    assert len(read) == characters, program.communicate(timeout=60)
    program.send_signal(signal.SIGINT)
    return read
