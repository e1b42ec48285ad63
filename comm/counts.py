"""Checks of arguments: counts, times, seeds, choices between two, objects of a class of ours."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral, Real

import numpy as np

MAX_SEED = 2**63 - 1
MAX_SECONDS = 1e9


def check_count(name: str, value: object, *, least: int = 1) -> None:
    """Raises a `ValueError` that names the value, unless it is a whole number of at least `least`; no bool is one."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ValueError(f"`{name}` must be a whole number of at least {least}, but is {value!r} instead.")


def check_seed(name: str, value: object) -> None:
    """Raises a `ValueError` that names the value, unless it is a whole number that random numbers can begin with."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not 0 <= int(value) <= MAX_SEED:
        raise ValueError(f"`{name}` must be a whole number from 0 to {MAX_SEED}, but is {value!r} instead.")


def check_seconds(name: str, value: object) -> None:
    """Raises a `ValueError` that names the value, unless it is a time that can be waited for."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) <= MAX_SECONDS:
        most = f"{MAX_SECONDS:g}"
        raise ValueError(f"`{name}` must be a number of seconds above 0, at most {most}, but is {value!r} instead.")


def check_flag(name: str, value: object) -> None:
    """Raises a `ValueError` that names the value, if it is anything but yes (True, 1) or no (False, 0, None)."""
    if value is not None and not (isinstance(value, (Integral, np.bool_)) and value in (False, True)):
        raise ValueError(f"`{name}` must be True or False, but is {value!r} instead.")


def check_state(state: object) -> None:
    """Raises a `ValueError`, unless it is what `state_dict` gives."""
    if not isinstance(state, Mapping):
        raise ValueError(f"A state must be what `state_dict` gave, a dict, but is {type(state).__name__} instead.")


def check_kind(name: str, value: object, kind: type, example: str) -> None:
    """Raises a `ValueError` that names the value and shows one as it should be, unless it is of this class of orch."""
    if not isinstance(value, kind):
        raise ValueError(f"`{name}` must be an `orch.{kind.__name__}`, such as `{example}`, but is {value!r} instead.")
