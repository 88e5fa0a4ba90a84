"""What Lightning tells the user on rank 0, by whichever logger it uses."""

from __future__ import annotations

import logging
import logging.handlers
from collections.abc import Iterator
from contextlib import contextmanager

import lightning_utilities.core.rank_zero as rank_zero_module


@contextmanager
def told() -> Iterator[list[str]]:
    """A list that holds, once the block is over, what was said in it by ``rank_zero_info`` and its like.

    Lightning has two such loggers. The one imported last is used, and may not hand on what it hears.
    """
    texts: list[str] = []
    logger, handler = rank_zero_module.log, logging.handlers.BufferingHandler(10_000)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield texts
    finally:
        texts.extend(record.getMessage() for record in handler.buffer)
        logger.removeHandler(handler)
        logger.setLevel(level)
