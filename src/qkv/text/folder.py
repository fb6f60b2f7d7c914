"""The tokenizer of a Hugging Face folder.

tokenizer.json                      the whole tokenizer
tokenizer.model, spiece.model       SentencePiece; the former also tiktoken's format (Llama 3)
vocab.json, merges.txt              byte-level BPE (GPT-2, RoBERTa), or BPE with "</w>" (GPT-1)
vocab.txt                           WordPiece (BERT)
tokenizer_config.json, special_tokens_map.json, added_tokens.json, generation_config.json, chat_template.jinja
                                    which tokens control, what they are for, when a text ends, how a chat is written
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from qkv.errors import CheckpointError
from qkv.text import model_file, tiktoken
from qkv.text.hf import LibraryTokenizer
from qkv.text.model_file_writer import to_model
from qkv.text.pieces import PieceTokenizer, Specials, looks_like_control
from qkv.text.sentencepiece import SentencePieceTokenizer
from qkv.text.spec import BYTE_LEVEL, Spec, added_token, bert, bpe, template

_ROLES = ("bos", "eos", "unk", "pad", "sep", "cls", "mask")
_END = "<|endoftext|>"
_LISTS = ("additional_special_tokens", "extra_special_tokens")


class Settings(NamedTuple):
    """What stands beside the vocabulary."""

    config: Spec
    """tokenizer_config.json over special_tokens_map.json."""
    added: dict[str, Spec]
    """Tokens beyond the vocabulary, or with a role, by text."""
    ends: frozenset[int]
    chat_template: str | None

    def name(self, role: str) -> str | None:
        """The text of the token with that role."""
        return _text(self.config.get(f"{role}_token"))

    def flag(self, key: str, default: bool) -> bool:
        """A yes or no of tokenizer_config.json."""
        value = self.config.get(key)
        return default if value is None else bool(value)


def has_tokenizer(folder: Path) -> bool:
    """Whether `read_folder` would find a tokenizer."""
    return any((folder / name).is_file() for name in _READERS)


def write_folder(folder: Path, tokenizer: object) -> bool:
    """Write the vocabulary (tokenizer.json or tokenizer.model), and beside it the roles of tokens and when texts end;
    False where the tokenizer has no such form."""
    if not isinstance(tokenizer, PieceTokenizer):
        return False
    specials = tokenizer.specials
    settings: Spec = dict(specials.names())
    if isinstance(tokenizer, LibraryTokenizer):
        _write(folder / "tokenizer.json", tokenizer.to_dict()["json"])
    elif isinstance(tokenizer, SentencePieceTokenizer) and (model := to_model(tokenizer)) is not None:
        (folder / "tokenizer.model").write_bytes(model)
        before, after = tokenizer.around
        settings |= {"add_bos_token": bool(before), "add_eos_token": bool(after)}
    else:
        return False
    if specials.chat_template is not None:
        settings["chat_template"] = specials.chat_template
    _write(folder / "tokenizer_config.json", settings)
    said: dict[str, Any] = {"eos_token_id": sorted(specials.ends)} if specials.ends else {}
    said |= dict(zip(("decoder_start_token_id", "forced_bos_token_id"), specials.starts, strict=False))
    if said:
        _write(folder / "generation_config.json", said)
    return True


def _write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def read_folder(folder: Path) -> PieceTokenizer:
    """The tokenizer of a folder, from the most complete description in it."""
    settings = _settings(folder)
    for name, reader in _READERS.items():
        if (folder / name).is_file():
            tokenizer = reader(folder / name, settings)
            tokenizer.specials = replace(tokenizer.specials, starts=_starts(folder))
            return tokenizer
    raise CheckpointError(f"{folder}: no tokenizer in it (none of {', '.join(_READERS)})")


def _tokenizer_json(path: Path, settings: Settings) -> LibraryTokenizer:
    spec = _json(path)
    if not isinstance(spec.get("model"), dict) or "vocab" not in spec["model"]:
        raise CheckpointError(f"{path}: not a tokenizer.json (no model with a vocab)")
    return finish(spec, settings, str(path))


def finish(spec: Spec, settings: Settings, where: str) -> LibraryTokenizer:
    """A tokenizer.json with what the other files say."""
    added = {token["content"]: token for token in spec.get("added_tokens") or []}
    vocab = spec["model"]["vocab"]
    ids = {piece: token for token, (piece, _) in enumerate(vocab)} if isinstance(vocab, list) else vocab
    following = 1 + max([*ids.values(), *(token["id"] for token in added.values())], default=-1)
    for text, token in settings.added.items():
        if text in added:
            added[text]["special"] = added[text]["special"] or token["special"]
            continue
        found = ids.get(text, token["id"])
        if found is None:
            found, following = following, following + 1
        added[text] = {**token, "id": found}
    spec["added_tokens"] = sorted(added.values(), key=lambda token: token["id"])
    controls = {text: t["id"] for text, t in added.items() if t["special"] or looks_like_control(text)}
    specials = _specials(controls, settings, where)
    _obey_flags(spec, specials, settings)
    return LibraryTokenizer(spec, specials, where)


def _specials(controls: Mapping[str, int], settings: Settings, where: str) -> Specials:
    roles: dict[str, Any] = {role: controls.get(settings.name(role) or "") for role in _ROLES}
    if lost := [role for role in _ROLES if settings.name(role) and roles[role] is None]:
        raise CheckpointError(f"{where}: {lost[0]}_token is {settings.name(lost[0])!r}, which the vocabulary lacks")
    ends = settings.ends | {token for token in (roles["eos"],) if token is not None}
    return Specials(controls, **roles, ends=ends, chat_template=settings.chat_template)


def _obey_flags(spec: Spec, specials: Specials, settings: Settings) -> None:
    """`add_bos_token` and `add_eos_token` of tokenizer_config.json overrule the template of tokenizer.json."""
    flags = {role: settings.config.get(f"add_{role}_token") for role in ("bos", "eos")}
    if not any(isinstance(flag, bool) for flag in flags.values()):
        return
    steps = json.dumps(spec.get("post_processor"))
    sides = []
    for role, flag in flags.items():
        name = settings.name(role)
        present = name is not None and f'"id": {json.dumps(name)}' in steps
        wanted = present if flag is None else bool(flag) and name is not None
        sides.append([name] if wanted and name is not None else [])
        flags[role] = wanted != present
    if any(flags.values()):
        spec["post_processor"] = template((sides[0], sides[1]), specials.controls)


def _sentencepiece(path: Path, settings: Settings) -> PieceTokenizer:
    if tiktoken.is_tiktoken(path):
        return tiktoken.read_llama3(path)  # the only models that call such a file tokenizer.model
    flags = {f"add_{role}": settings.config.get(f"add_{role}_token") for role in ("bos", "eos")}
    tokenizer = model_file.read(path, **flags)
    beyond = {text for text, token in settings.added.items() if text not in tokenizer.specials.controls}
    if beyond:
        raise CheckpointError(f"{path}: {len(beyond)} added tokens ({min(beyond)!r}, ...) are not in it; "
                              "save the tokenizer as tokenizer.json")  # fmt: skip
    named = _specials(tokenizer.specials.controls, settings, str(path))
    roles = {role: getattr(named if settings.name(role) else tokenizer.specials, role) for role in _ROLES}
    tokenizer.specials = replace(
        tokenizer.specials, **roles, ends=tokenizer.specials.ends | named.ends, chat_template=named.chat_template
    )
    return tokenizer


def _vocab_and_merges(path: Path, settings: Settings) -> LibraryTokenizer:
    vocab, merges = _json(path), _merges(path.with_name("merges.txt"))
    if any(merge.endswith("</w>") for merge in merges):
        return finish(_gpt1(vocab, merges), settings, str(path))
    if not settings.added and _END in vocab:
        roles = dict.fromkeys(("bos_token", "eos_token", "unk_token"), _END)
        added = {_END: added_token(vocab[_END], _END, special=True)}
        settings = settings._replace(added=added, config={**settings.config, **roles})
    if isinstance(settings.config.get("mask_token"), str):
        # By itself the format cannot say it: the mask of RoBERTa takes the space before it along.
        settings.added[settings.config["mask_token"]]["lstrip"] = True
    spec: Spec = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {
            **BYTE_LEVEL,
            "add_prefix_space": settings.flag("add_prefix_space", False),
            "use_regex": True,
        },
        "post_processor": _roberta(vocab, settings),
        "decoder": BYTE_LEVEL,
        "model": bpe(vocab, merges),
    }
    return finish(spec, settings, str(path))


def _roberta(vocab: Mapping[str, int], settings: Settings) -> Spec | None:
    """Vocabularies with a class and a separator token join texts as RoBERTa does: <s> A </s></s> B </s>."""
    start, end = settings.name("cls"), settings.name("sep")
    if start not in vocab or end not in vocab or start is None or end is None:
        return None
    return template(([start], [end]), vocab, between=[end])


def _gpt1(vocab: Mapping[str, int], merges: list[str]) -> Spec:
    return {
        "version": "1.0",
        "added_tokens": [added_token(vocab["<unk>"], "<unk>", special=True)] if "<unk>" in vocab else [],
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": True,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": None,
        "decoder": {"type": "BPEDecoder", "suffix": "</w>"},
        "model": bpe(vocab, merges, end_of_word_suffix="</w>", unk_token="<unk>" if "<unk>" in vocab else None),
    }


def _vocab_txt(path: Path, settings: Settings) -> LibraryTokenizer:
    lines = _read(path).removesuffix("\n").split("\n")
    vocab = {line.removesuffix("\r"): token for token, line in enumerate(lines)}
    if len(vocab) != len(lines):
        raise CheckpointError(f"{path}: {len(lines) - len(vocab)} lines stand in it twice")
    names = [settings.name(role) or f"[{role.upper()}]" for role in ("unk", "cls", "sep", "pad", "mask")]
    roles = {name: vocab[name] for name in names if name in vocab}
    spec = bert(
        str(path),
        vocab,
        roles,
        lowercase=settings.flag("do_lower_case", True),
        strip_accents=settings.config.get("strip_accents"),
        chinese=settings.flag("tokenize_chinese_chars", True),
    )
    named = {
        f"{role}_token": f"[{role.upper()}]"
        for role in ("unk", "cls", "sep", "pad", "mask")
        if f"[{role.upper()}]" in roles
    }
    return finish(spec, settings._replace(config={**named, **settings.config}), str(path))


def _settings(folder: Path) -> Settings:
    config = {**_optional(folder / "special_tokens_map.json"), **_optional(folder / "tokenizer_config.json")}
    added = {
        text: added_token(token, text, special=False) for text, token in _optional(folder / "added_tokens.json").items()
    }
    for token, entry in (config.get("added_tokens_decoder") or {}).items():
        added[entry["content"]] = {**added_token(int(token), entry["content"], special=False), **entry}
    for entry in _named(config):
        known = added.get(_text(entry) or "", added_token(0, "", special=True) | {"id": None})
        given = entry if isinstance(entry, dict) else {"content": entry}
        flags = {key: given[key] for key in ("content", "lstrip", "rstrip") if key in given}
        added[flags["content"]] = {**known, **flags, "special": True}
    ends = _optional(folder / "generation_config.json").get("eos_token_id")
    ends = frozenset([] if ends is None else ends if isinstance(ends, list) else [ends])
    return Settings(config, added, ends, _chat_template(folder, config))


def _starts(folder: Path) -> tuple[int, ...]:
    """What a decoder beside an encoder begins with: its start token, and a first word that is always the same."""
    said = {**_optional(folder / "config.json"), **_optional(folder / "generation_config.json")}
    wanted = (said.get("decoder_start_token_id"), said.get("forced_bos_token_id"))
    return tuple(token for token in wanted if isinstance(token, int))


def _named(config: Spec) -> list[str | Spec]:
    """The tokens that have a role, and those that are special for no stated reason."""
    found = [config[f"{role}_token"] for role in _ROLES if config.get(f"{role}_token") is not None]
    for key in _LISTS:
        listed = config.get(key) or []
        found += listed.values() if isinstance(listed, dict) else listed
    return found


def _chat_template(folder: Path, config: Spec) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return _read(path)
    found = config.get("chat_template") or _optional(folder / "chat_template.json").get("chat_template")
    if isinstance(found, list):
        # Several templates by name; the one for chats is called default.
        found = {one["name"]: one["template"] for one in found}.get("default")
    return found if isinstance(found, str) else None


def _merges(path: Path) -> list[str]:
    lines = _read(path).split("\n")
    return [line.removesuffix("\r") for line in lines if line.strip() and not line.startswith("#version")]


def _text(entry: Any) -> str | None:
    found = entry.get("content") if isinstance(entry, dict) else entry
    return found if isinstance(found, str) else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise CheckpointError(f"{path}: no UTF-8 text") from None


def _json(path: Path) -> Spec:
    try:
        found = json.loads(_read(path))
    except ValueError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: not JSON ({error})") from None
    except RecursionError:
        raise CheckpointError(f"{path}: not JSON (nested too deeply)") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: a JSON object belongs here, not {type(found).__name__}")
    return found


def _optional(path: Path) -> Spec:
    return _json(path) if path.is_file() else {}


_READERS: dict[str, Callable[[Path, Settings], PieceTokenizer]] = {
    "tokenizer.json": _tokenizer_json,
    "tokenizer.model": _sentencepiece,
    "spiece.model": _sentencepiece,
    "vocab.json": _vocab_and_merges,
    "vocab.txt": _vocab_txt,
}
