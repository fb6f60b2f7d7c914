"""A conversation: a list of messages, as chat templates and other programs know it, in memory and in a JSON file.

    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}, {"role": "assistant", ...}]

The file is replaced as a whole, so that it holds the conversation before a turn or after it. What is no conversation is
never written over.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from qkv.errors import DataError

Message = dict[str, str]

_ROLES = ("system", "user", "assistant")


class Conversation:
    """What was said so far, kept in a file if there is one."""

    def __init__(self, file: Path | None = None, system: str | None = None) -> None:
        """Goes on with what the file holds; `system` takes the place of its system message."""
        self.file = file
        self.messages: list[Message] = [] if file is None else _read(file)
        if system is not None:
            self.messages = [{"role": "system", "content": system}, *self.said]

    @property
    def said(self) -> list[Message]:
        """All but the system message."""
        return self.messages[1:] if self.messages and self.messages[0]["role"] == "system" else self.messages

    def asked(self, text: str) -> list[Message]:
        """The messages with one more of the user; nothing is kept yet."""
        return [*self.messages, {"role": "user", "content": text}]

    def answered(self, asked: list[Message], text: str) -> None:
        """Keep what was asked and its answer."""
        self._become([*asked, {"role": "assistant", "content": text}])

    def undo(self) -> bool:
        """Forget the last message of the user and what followed; False if there is none."""
        places = [place for place, message in enumerate(self.messages) if message["role"] == "user"]
        if places:
            self._become(self.messages[: places[-1]])
        return bool(places)

    def reset(self) -> None:
        """Forget all but the system message."""
        self._become(self.messages[: len(self.messages) - len(self.said)])

    def save(self, file: Path) -> None:
        """Write the conversation into a file that does not exist yet."""
        if file.exists():
            raise DataError(f"{file}: exists already; choose another file")
        _write(file, self.messages)

    def _become(self, messages: list[Message]) -> None:
        self.messages = messages
        if self.file is not None:
            _write(self.file, messages)


def _read(file: Path) -> list[Message]:
    """The messages in a file; none if it is not there yet, but could be."""
    if not file.exists():
        if not file.absolute().parent.is_dir():
            raise DataError(f"{file}: there is no folder {file.absolute().parent} to keep it in; make it first")
        return []
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror}); give another file") from None
    except (ValueError, RecursionError) as error:
        raise _damaged(file, f"not JSON: {error}") from None
    if not isinstance(found, list):
        raise _damaged(file, "not a list of messages")
    for number, message in enumerate(found, start=1):
        if not _is_message(message):
            raise _damaged(file, f"message {number} is no role ({', '.join(_ROLES)}) and content")
    return found


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, dict)
        and message.keys() == {"role", "content"}
        and message["role"] in _ROLES
        and isinstance(message["content"], str)
    )


def _damaged(file: Path, reason: str) -> DataError:
    return DataError(f"{file}: holds no conversation ({reason}); it is left as it is, give another file")


def _write(file: Path, messages: list[Message]) -> None:
    """Replace the file as a whole, whatever happens meanwhile; a link stays, and what it leads to is replaced."""
    target = file.resolve()
    content = json.dumps(messages, ensure_ascii=False, indent=2) + "\n"
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with open(descriptor, "w", encoding="utf-8") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        os.replace(name, target)
    finally:
        Path(name).unlink(missing_ok=True)  # still there if something went wrong
