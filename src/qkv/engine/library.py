"""The C++ runtime: compiled at first use, kept in this machine's store, and called through ctypes.

Each instruction set is a source file with flags of its own, and the runtime chooses among them when it starts; nothing
is compiled for this very processor, so that a library may be copied. The file's name holds a hash of the sources and of
the compiler.
"""

from __future__ import annotations

import ctypes as ct
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from qkv.errors import EngineError

SOURCES = Path(__file__).parent / "native"
_COMMON = ("-O3", "-std=c++17", "-fPIC", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden")
_X86 = {
    "kernels_avx512.cpp": ("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq",
                           "-mavx512vnni"),
    "kernels_avx2.cpp": ("-mavx2", "-mfma", "-mf16c"),
}  # fmt: skip
_EVERYWHERE = ("kernels_portable.cpp", "team.cpp", "run.cpp")


class Matrix(ct.Structure):
    """As in engine.h."""

    _fields_ = [(name, ct.c_int32) for name in ("format", "rows", "columns", "padding")] + [("data", ct.c_void_p)]


class Instruction(ct.Structure):
    """As in engine.h."""

    _fields_ = [
        *((name, ct.c_int32) for name in ("op", "out", "read", "other")),
        ("n", ct.c_int32 * 10),
        ("x", ct.c_float * 4),
        ("p", ct.c_void_p * 4),
    ]


class Streams(ct.Structure):
    """As in engine.h."""

    _fields_ = [
        *((name, ct.c_void_p) for name in ("keys", "values")),
        *((name, ct.c_int64) for name in ("key_line", "key_head", "value_line", "value_head")),
    ]


class Slots(ct.Structure):
    """As in engine.h."""

    _fields_ = [
        ("to", ct.c_void_p),
        ("positions", ct.c_void_p),
        ("capacity", ct.c_int64),
        ("used", ct.c_int32),
        ("padding", ct.c_int32),
    ]


class Call(ct.Structure):
    """As in engine.h."""

    _fields_ = [
        *((name, ct.c_int32) for name in ("M", "W")),
        *((name, ct.c_void_p) for name in ("token", "line", "position", "wanted", "layers", "groups")),
        *((name, ct.c_int32) for name in ("most_slots", "out")),
        ("result", ct.c_void_p),
    ]


@cache
def library() -> ct.CDLL:
    """The runtime, compiled if it is not there yet. Raises EngineError where that fails."""
    found = ct.CDLL(str(_compiled()))
    found.qkv_kernels.restype = ct.c_char_p
    found.qkv_kernels.argtypes = [ct.c_char_p]
    found.qkv_program.restype = ct.c_void_p
    found.qkv_program.argtypes = [
        ct.c_void_p,
        ct.c_int,
        ct.c_void_p,
        ct.c_int,
        ct.c_void_p,
        ct.c_int,
        ct.c_char_p,
        ct.c_int,
    ]
    found.qkv_free.argtypes = [ct.c_void_p]
    found.qkv_run.argtypes = [ct.c_void_p, ct.c_void_p]
    return found


def kernels(name: str = "") -> str | None:
    """The name of the kernels that this machine runs best, or `name` if it runs those; None if it does not."""
    found = library().qkv_kernels(name.encode())
    return None if found is None else found.decode()


def compiler() -> str:
    """The C++ compiler: $CXX, or the first that is found."""
    candidates = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    found = next((path for path in candidates if path and shutil.which(path)), None)
    if found is None:
        raise EngineError("engine: needs a C++ compiler once, and there is none; install g++ or clang++, or set CXX")
    return found


def _compiled() -> Path:
    """The library's file."""
    program = compiler()
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    sources = sorted(SOURCES.iterdir())
    parts = [path.name.encode() + path.read_bytes() for path in sources] + [version.encode(), str(_flags()).encode()]
    home = Path(os.environ.get("QKV_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qkv")
    target = home / "engine" / f"{hashlib.sha256(b''.join(parts)).hexdigest()[:16]}.so"
    if not target.is_file():
        _compile(program, target)
    return target


def _flags() -> dict[str, tuple[str, ...]]:
    """Each source that is compiled here, with its own flags."""
    x86 = _X86 if platform.machine() in ("x86_64", "AMD64") else {}
    return x86 | dict.fromkeys(_EVERYWHERE, ())


def _compile(program: str, target: Path) -> None:
    """All sources, then the library, which appears at its place whole."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as scratch:
        objects = []
        for source, flags in _flags().items():
            objects.append(f"{scratch}/{source}.o")
            _run([program, *_COMMON, *flags, "-c", str(SOURCES / source), "-o", objects[-1]])
        whole = f"{scratch}/whole.so"
        _run([program, "-shared", "-pthread", *objects, "-o", whole])
        os.replace(whole, target)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
        raise EngineError(
            f"engine: {command[0]} cannot compile it ({said}); choose torch, or another compiler with CXX"
        )
