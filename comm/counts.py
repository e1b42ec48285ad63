"""Numbers that count something."""

from __future__ import annotations

from numbers import Integral


def check_count(name: str, value: object) -> None:
    """Raises a `ValueError` that names the value, unless it is a whole number of at least 1."""
    if not isinstance(value, Integral) or value < 1:
        raise ValueError(f"`{name}` must be a whole number of at least 1, but is {value!r} instead.")
