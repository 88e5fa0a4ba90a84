"""Checks of what a person gives to the planner; each failure says what to change."""

from __future__ import annotations

import math

from lightning_3d.errors import ConfigError


def positive(name: str, value: object, also: str = "") -> None:
    """Refuse what is not a whole number of at least one."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}={value!r} must be a positive whole number{also}.")


def positive_number(name: str, value: object) -> None:
    """Refuse what is not a finite number above zero."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"{name}={value!r} must be a positive number.")


def one_of(name: str, value: object, known: tuple[object, ...]) -> None:
    """Refuse a value that is not among those known."""
    if value not in known:
        choices = ", ".join(repr(item) for item in known)
        raise ConfigError(f"{name}={value!r} is not known. Choose from {choices}.")
