"""Ranks that were set up differently are told so at the start, before they wait for each other in vain."""

from __future__ import annotations

import numbers
import re
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass

from torch.distributed import ProcessGroup

from orch.comm.gather import gather_ragged
from orch.comm.groups import get_global_ranks
from orch.comm.hosts import decode_text, encode_text

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def told(value: object, *, within: tuple[int, ...] = ()) -> str:
    """A value in words that are the same on every rank: its `repr`, without addresses.

    Objects of classes without a `repr` of their own, such as a user's cost model, are told by class and attributes.

    Args:
        value: The value.
        within: Ids of the objects that hold it, since these may refer to each other.
    """
    if id(value) in within:
        return "..."
    within = (*within, id(value))
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{told(key)}: {told(each, within=within)}' for key, each in value.items())}}}"
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


def check_alike(choices: Mapping[str, object], group: ProcessGroup | None) -> None:
    """Compares what ranks were told to do; all of them call it.

    Args:
        choices: Names and values, of which is compared what `told` says; the same names on all ranks of one version.
        group: A CPU (gloo) group; None for the world.

    Raises:
        ValueError: On all ranks alike, if any differs; names the ranks and what they have in place of rank 0's.
    """
    own = "\n".join(f"{name}={told(value)}" for name, value in choices.items())
    ranks = get_global_ranks(group)
    all_told = [decode_text(words).split("\n") for words in gather_ragged(encode_text(own), group, label="choices")]
    wrong = [
        f"rank {rank} has {_only_in(lines, all_told[0])} where rank {ranks[0]} has {_only_in(all_told[0], lines)}"
        for rank, lines in zip(ranks, all_told, strict=True)
        if lines != all_told[0]
    ]
    if wrong:
        raise ValueError(f"`orch.orchestrate` must be set up alike on all ranks, but {'; '.join(wrong)} instead.")


def _only_in(lines: list[str], others: list[str]) -> str:
    return ", ".join(line for line in lines if line not in others) or "nothing"
