"""Ranks that were set up differently are told so before they wait for each other in vain, or train on wrong samples."""

from __future__ import annotations

import json
import numbers
import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass

from torch.distributed import ProcessGroup

from orch.comm.gather import gather_ragged
from orch.comm.groups import get_global_ranks
from orch.comm.hosts import decode_text, encode_text

MAX_NAMED = 4
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def check_alike(what: str, settings: Mapping[str, object], group: ProcessGroup | None, *, label: str) -> None:
    """Compares what ranks are about to do; all of them call it.

    Args:
        what: What was set up, in words.
        settings: Words for each setting, and its value, of which is compared what `told` says. Strings are themselves;
            2.0 is not 2, since it may not do where a count is asked for.
        group: A CPU (gloo) group; None for the world.
        label: What it is for, in a `CollectiveLog`.

    Raises:
        ValueError: On all ranks alike, if any setting differs; names it, and who has which value.
    """
    own = json.dumps({name: _worded(value) for name, value in settings.items()})
    texts = [decode_text(words) for words in gather_ragged(encode_text(own), group, label=label)]
    told_in = {text: json.loads(text) for text in dict.fromkeys(texts)}
    names = dict.fromkeys(name for values in told_in.values() for name in values)
    values = {name: [told_in[text].get(name, "unknown") for text in texts] for name in names}
    ranks = get_global_ranks(group)
    wrong = [f"{name} is {_by_rank(found, ranks)}" for name, found in values.items() if len(set(found)) > 1]
    if wrong:
        raise ValueError(f"{what} must be set up alike on all ranks, but {'; '.join(wrong)} instead.")


def _worded(value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral):
        return repr(float(value))
    return told(value)


def _by_rank(values: Sequence[str], ranks: Sequence[int]) -> str:
    """Which ranks have which value, that of the lowest rank first."""
    having: dict[str, list[int]] = {}
    for value, rank in zip(values, ranks, strict=True):
        having.setdefault(value, []).append(rank)
    words = [f"{value} on {_named(of_value)}" for value, of_value in having.items()]
    if len(words) > MAX_NAMED:
        words = [*words[:MAX_NAMED], f"{len(words) - MAX_NAMED} other values elsewhere"]
    return f"{', '.join(words[:-1])} and {words[-1]}"


def _named(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - MAX_NAMED} more" if len(ranks) > MAX_NAMED else ""
    return f"ranks {list(ranks[:MAX_NAMED])}{more}"


def told(value: object, *, within: tuple[int, ...] = ()) -> str:
    """A value in words that are the same on every rank: its `repr`, without addresses.

    Objects of classes without a `repr` of their own, such as a user's cost model, are told by class and attributes. The
    order of a mapping's keys does not count. What has no words, as an object whose `repr` fails, is told by its class.

    Args:
        value: The value.
        within: Ids of the objects that hold it, since these may refer to each other.
    """
    if id(value) in within:
        return "..."
    try:
        return _told(value, (*within, id(value)))
    except Exception as error:
        return f"{type(value).__qualname__} without words ({type(error).__name__})"


def _told(value: object, within: tuple[int, ...]) -> str:
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{told(key)}: {told(each, within=within)}' for key, each in value.items()))}}}"
    if isinstance(value, AbstractSet):
        return f"{{{', '.join(sorted(told(each, within=within) for each in value))}}}"
    if type(value) in (list, tuple):
        words = ", ".join(told(each, within=within) for each in value)  # type: ignore[attr-defined]
        return f"[{words}]" if isinstance(value, list) else f"({words})"
    if is_dataclass(value) and not isinstance(value, type):
        return _told_by(
            type(value), {spec.name: getattr(value, spec.name) for spec in fields(value) if spec.repr}, within
        )
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        number = int(value) if isinstance(value, numbers.Integral) else float(value)
        return repr(int(number) if number == number // 1 else number)
    if type(value).__repr__ is object.__repr__:
        return _told_by(type(value), dict(sorted(_attributes(value).items())), within)
    return _ADDRESS.sub("", repr(value)).replace("\n", " ")


def _told_by(kind: type, attributes: Mapping[str, object], within: tuple[int, ...]) -> str:
    words = ", ".join(f"{name}={told(value, within=within)}" for name, value in attributes.items())
    return f"{kind.__qualname__}({words})"


def _attributes(value: object) -> dict[str, object]:
    """What `vars` says, and the slots, if there are any."""
    slots = [getattr(kind, "__slots__", ()) for kind in type(value).__mro__]
    names = [name for of_kind in slots for name in ([of_kind] if isinstance(of_kind, str) else of_kind)]
    found = {name: getattr(value, name) for name in names if not name.startswith("__") and hasattr(value, name)}
    return {**found, **getattr(value, "__dict__", {})}
