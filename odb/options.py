"""Checks of a loader's arguments, and what older scripts call them."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from difflib import get_close_matches
from typing import Any, Literal, get_args

from torch.utils.data import DataLoader

from orch.comm.counts import check_count, check_flag, check_seed
from orch.odb.buffer import WindowSize
from orch.odb.step_info import resolve_loss_scaling

Grouping = Literal["global", "local"]
DEFAULT_BUFFER_SIZE = 256
DEFAULT_NUM_BATCHES = 16
MAX_BUFFER_SIZE = 16384
NO_EFFECT = ("no_warmup", "no_sync", "version", "group_order_flip")


def window_size(token_budget: int, buffer_size: int | None, buffer_bytes: int) -> WindowSize:
    """A window of `buffer_size` samples; by default as many as fill batches well, whatever their lengths."""
    check_count("buffer_bytes", buffer_bytes)
    if buffer_size is not None:
        check_count("buffer_size", buffer_size)
        return WindowSize(buffer_size, 0, buffer_bytes, buffer_size)
    return WindowSize(DEFAULT_BUFFER_SIZE, DEFAULT_NUM_BATCHES * token_budget, buffer_bytes, MAX_BUFFER_SIZE)


def take_older_names(given: dict[str, Any], known: Collection[str] = (), **current: Any) -> dict[str, Any]:
    """Takes the names of `online-dynamic-batching` out of `given`.

    Args:
        given: All keywords that the loader does not know by itself.
        known: Those that it knows, of which one may have been meant.
        **current: What was given under the names of today: `token_budget`, `loss_scaling`, `join`, `buffer_size`.

    Returns:
        `current` with what was given under older names, or in a `config`, in it.

    Raises:
        TypeError: If torch's DataLoader does not know what is left.
        ValueError: If two names of the same thing disagree, no budget is given, or `max_patches` is.
    """
    resolved = dict(current)
    config = given.pop("config", None)
    if config is not None:
        resolved.update({name: _of_config(name, value, getattr(config, name)) for name, value in current.items()})
    for older, name in (("max_input_length", "token_budget"), ("join_mode", "join")):
        value = given.pop(older, None)
        if value is not None:
            if resolved[name] not in (None, value):
                raise ValueError(f"`{older}` must be `{name}`, {resolved[name]}, but is {value} instead.")
            resolved[name] = value
    for name in (*NO_EFFECT, "loss_scaling_approx"):
        given.pop(name, None)
    if given.pop("max_patches", 0) or getattr(config, "max_patches", 0):
        raise ValueError("`max_patches` must be 0 (count patches in `length_fn`), but is not.")
    of_torch = inspect.signature(DataLoader).parameters
    if unknown := sorted(set(given) - set(of_torch)):
        meant = [name for given_name in unknown for name in get_close_matches(given_name, {*known, *of_torch}, n=1)]
        asked = f" Did you mean {' and '.join(map(repr, meant))}?" if meant else ""
        raise TypeError(f"`ODBDataLoader` and torch's `DataLoader` have no arguments {unknown}.{asked}")
    if resolved["token_budget"] is None:
        raise ValueError("`token_budget` must be given, but is None instead.")
    check_count("token_budget", resolved["token_budget"])
    resolved["join"] = True if resolved["join"] is None else resolved["join"]
    check_flag("join", resolved["join"])
    return resolved


def _of_config(name: str, given: Any, of_config: Any) -> Any:
    """What `config` says, or what was given where it says nothing; a `loss_scaling` of "exact" may be the default."""
    if name == "loss_scaling":
        given, of_config = resolve_loss_scaling(given), resolve_loss_scaling(of_config)
        given = None if given == "exact" else given
    if of_config is None:
        return given
    if given not in (None, of_config):
        raise ValueError(f"`{name}` must be that of `config`, {of_config!r}, but is {given!r} instead.")
    return of_config


def check_arguments(
    grouping: str,
    accumulation_steps: int,
    max_length: int | None,
    over_length: str,
    batch_size: int | None,
    drop_last: bool,
    seed: int,
    num_workers: int,
    prefetch_factor: int | None,
    **flags: bool,
) -> None:
    """Refuses arguments that make no sense.

    Raises:
        ValueError: Says which, and what it must be.
    """
    if grouping not in get_args(Grouping):
        raise ValueError(f"`grouping` must be 'global' or 'local', but is {grouping!r} instead.")
    check_count("accumulation_steps", accumulation_steps)
    check_count("num_workers", num_workers, least=0)
    check_seed("seed", seed)
    for name, count in {"max_length": max_length, "prefetch_factor": prefetch_factor}.items():
        if count is not None:
            check_count(name, count)
    for name, value in flags.items():
        check_flag(name, value)
    if over_length not in ("drop", "raise"):
        raise ValueError(f"`over_length` must be 'drop' or 'raise', but is {over_length!r} instead.")
    if batch_size not in (None, 1) or isinstance(batch_size, bool):
        raise ValueError(f"`batch_size` must be 1 or None, since the budget decides, but is {batch_size!r} instead.")
    check_flag("drop_last", drop_last)
    if drop_last:
        raise ValueError("`drop_last` must be False (see `join`), but is True instead.")
