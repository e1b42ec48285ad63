"""Numbers that count something, and choices between two."""

from __future__ import annotations

from numbers import Integral


def check_count(name: str, value: object, *, least: int = 1) -> None:
    """Raises a `ValueError` that names the value, unless it is a whole number of at least `least`; no bool is one."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ValueError(f"`{name}` must be a whole number of at least {least}, but is {value!r} instead.")


def check_flag(name: str, value: object) -> None:
    """Raises a `ValueError` that names the value, if it is anything but yes (True, 1) or no (False, 0, None)."""
    if value is not None and value not in (False, True):
        raise ValueError(f"`{name}` must be True or False, but is {value!r} instead.")
