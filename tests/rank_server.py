"""Imported last by the server that ranks are forked from: what is in memory now is the same in every rank.

A rank would otherwise visit the million objects of the imported libraries in every garbage collection, and copy the
pages that they lie in: half of the CPU time of a small run.
"""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
