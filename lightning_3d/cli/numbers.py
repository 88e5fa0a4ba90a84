"""Numbers as options of commands: what is out of range ends with exit code 2, never as "not given"."""

from __future__ import annotations

import argparse
import math


def positive(text: str) -> int:
    """A whole number of at least 1."""
    return _whole(text, 1)


def whole(text: str) -> int:
    """A whole number of at least 0."""
    return _whole(text, 0)


def positive_number(text: str) -> float:
    """A finite number above 0."""
    if not (number := _number(text)) > 0:
        raise argparse.ArgumentTypeError(f"{text} must be above 0")
    return number


def not_negative(text: str) -> float:
    """A finite number of at least 0."""
    if (number := _number(text)) < 0:
        raise argparse.ArgumentTypeError(f"{text} must not be negative")
    return number


def _whole(text: str, least: int) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
    if number < least:
        raise argparse.ArgumentTypeError(f"{text} must be at least {least}")
    return number


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text} must be finite")
    return number
