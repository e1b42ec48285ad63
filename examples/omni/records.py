"""Records of chat data with media: read, checked, and each one's defect kept by its identity, source and row.

Two forms are read, as JSON (a list) or JSONL: `messages` with `role` and `content`, beside `images`, `audios`,
`videos`; and LLaVA's or ShareGPT's `conversations` with `from` and `value`, beside `image` or `images`. Paths are
relative to the file.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MEDIA = ("image", "audio", "video")
PLACEHOLDER = re.compile("<(" + "|".join(MEDIA) + ")>")
_ROLES = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant", "system": "system"}
# What decoders of media raise at malformed bytes. No MemoryError: its reason does not lie in the record alone.
DECODING_ERRORS = (OSError, ValueError, TypeError, ArithmeticError, LookupError, SyntaxError, EOFError, struct.error)


class UnusableRecordError(Exception):
    """A record cannot be used, for the reason given."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One message: `role` is system, user or assistant; placeholders of media stand in `content`."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Record:
    """One usable conversation.

    Attributes:
        source: The file.
        row: Its line, or its place in a JSON list, from 1. `(source, row)` is the identity: ids may repeat.
        id: As the file says, for messages.
        turns: The conversation.
        media: Paths by kind (image, audio, video), in the order of their placeholders.
    """

    source: str
    row: int
    id: str
    turns: tuple[Turn, ...]
    media: dict[str, tuple[Path, ...]]


@dataclass(frozen=True, slots=True)
class Defect:
    """A row that is no usable record, and why."""

    source: str
    row: int
    id: str
    reason: str


def read_records(path: Path | str, *, images_without_placeholder: str = "reject") -> list[Record | Defect]:
    """Reads a file of records.

    Args:
        path: A `.json` or `.jsonl` file.
        images_without_placeholder: `reject` a record whose media have no placeholder at all, or `prepend` them to
            the first user turn.

    Returns:
        One entry for each row, in order. Media are not opened.

    Raises:
        ValueError: If the file is neither kind, or a `.json` file is not a list or nested too deeply; or if the option
            is unknown.
    """
    if images_without_placeholder not in ("reject", "prepend"):
        raise ValueError(
            "`images_without_placeholder` must be 'reject' or 'prepend', "
            f"but is {images_without_placeholder!r} instead."
        )
    path = Path(path)
    if path.suffix not in (".json", ".jsonl"):
        raise ValueError(f"`path` must be a .json or .jsonl file, but is {path} instead.")
    entries: list[Record | Defect] = []
    for row, value in _rows(path):
        name = f"row {row}"
        try:
            name = _name(value, name)
            entries.append(_record(path, row, name, value, images_without_placeholder == "prepend"))
        except UnusableRecordError as error:
            entries.append(Defect(str(path), row, name, str(error)))
    return entries


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    """Row numbers from 1 and their values; an unreadable line's value is the `UnusableRecordError`."""
    text = path.read_bytes().decode("utf-8", errors="replace")
    if path.suffix == ".json":
        try:
            values = json.loads(text)
        except RecursionError:
            raise ValueError(f"`path` must hold a list of records, but {path} is nested too deeply instead.") from None
        if not isinstance(values, list):
            raise ValueError(f"`path` must hold a list, but {path} holds a {type(values).__name__} instead.")
        yield from enumerate(values, 1)
        return
    for row, line in enumerate(text.rstrip("\n").split("\n"), 1):
        yield row, _parsed(line)


def _parsed(line: str) -> Any:
    if not line.strip():
        return UnusableRecordError("the line is empty")
    try:
        return json.loads(line, parse_constant=_refuse_constant)
    except ValueError as error:
        return UnusableRecordError(f"the line is no JSON ({error})")
    except RecursionError:
        return UnusableRecordError("the line is nested too deeply")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _name(value: Any, default: str) -> str:
    """The id as text, where there is one."""
    found = value.get("id") if isinstance(value, dict) else None
    if found is None:
        return default
    if isinstance(found, bool) or not isinstance(found, (str, int, float)):
        raise UnusableRecordError(f"its `id` is a {type(found).__name__}, not text or a number")
    return _utf8(str(found), "its `id`")


def _utf8(text: str, what: str) -> str:
    """The text itself: JSON may hold lone surrogates, which neither a tokenizer nor a file's name or a log takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UnusableRecordError(f"{what} is no text in UTF-8 ({error})") from error
    return text


def _record(path: Path, row: int, name: str, value: Any, prepend: bool) -> Record:
    if isinstance(value, UnusableRecordError):
        raise value
    if not isinstance(value, dict):
        raise UnusableRecordError(f"it is a {type(value).__name__}, not an object")
    media = {kind: _paths(path.parent, value, kind) for kind in MEDIA}
    turns = _turns(value)
    if prepend:
        turns = _with_placeholders(turns, media)
    _check_roles(turns)
    _check_placeholders(turns, media)
    return Record(str(path), row, name, turns, media)


def _paths(folder: Path, value: dict[str, Any], kind: str) -> tuple[Path, ...]:
    """Paths under `image` or `images`, a string or a list; nothing, and an empty string, are none."""
    found = value.get(f"{kind}s", value.get(kind))
    found = [] if found is None or found == "" else [found] if isinstance(found, str) else found
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise UnusableRecordError(f"`{kind}s` is not a list of paths")
    return tuple(folder / _utf8(name, f"a path in `{kind}s`") for name in found)


def _turns(value: dict[str, Any]) -> tuple[Turn, ...]:
    for key, role_key, content_key in (("messages", "role", "content"), ("conversations", "from", "value")):
        if key in value:
            messages = [] if value[key] is None else value[key]
            if not isinstance(messages, list):
                raise UnusableRecordError(f"`{key}` is a {type(messages).__name__}, not a list")
            return tuple(_turn(message, role_key, content_key) for message in messages)
    raise UnusableRecordError("it has neither `messages` nor `conversations`")


def _turn(message: Any, role_key: str, content_key: str) -> Turn:
    if not isinstance(message, dict) or not isinstance(message.get(content_key), str):
        raise UnusableRecordError(f"a message has no text under `{content_key}`")
    role = message.get(role_key)
    if not isinstance(role, str):
        raise UnusableRecordError(f"a message has no text under `{role_key}`")
    if role not in _ROLES:
        raise UnusableRecordError(f"the role {role!r} is unknown")
    return Turn(_ROLES[role], _utf8(message[content_key], f"a message's `{content_key}`"))


def _with_placeholders(turns: tuple[Turn, ...], media: dict[str, tuple[Path, ...]]) -> tuple[Turn, ...]:
    """Placeholders before the first user turn, for the kinds that have none in the whole conversation."""
    present = {kind for turn in turns for kind in PLACEHOLDER.findall(turn.content)}
    prefix = "".join(f"<{kind}>" * len(paths) for kind, paths in media.items() if kind not in present)
    first = next((index for index, turn in enumerate(turns) if turn.role == "user"), None)
    if not prefix or first is None:
        return turns
    return (*turns[:first], Turn("user", prefix + turns[first].content), *turns[first + 1 :])


def _check_roles(turns: tuple[Turn, ...]) -> None:
    """A system turn may come first; then user and assistant alternate, and the assistant ends."""
    roles = [turn.role for turn in turns]
    spoken = roles[1:] if roles[:1] == ["system"] else roles
    if not spoken or len(spoken) % 2 or spoken != ["user", "assistant"] * (len(spoken) // 2):
        raise UnusableRecordError(f"user and assistant do not alternate: {', '.join(roles) or 'no turn'}")
    if any(turn.role == "assistant" and not turn.content.strip() for turn in turns):
        raise UnusableRecordError("an assistant turn is empty")


def _check_placeholders(turns: tuple[Turn, ...], media: dict[str, tuple[Path, ...]]) -> None:
    found = [kind for turn in turns for kind in PLACEHOLDER.findall(turn.content)]
    for kind, paths in media.items():
        if found.count(kind) != len(paths):
            raise UnusableRecordError(f"it has {found.count(kind)} placeholders <{kind}> for {len(paths)} files")
