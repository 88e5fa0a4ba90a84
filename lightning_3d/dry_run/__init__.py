"""A dry run: ranks of the real job, run by the real code, without memory and without the other ranks."""

from __future__ import annotations

from lightning_3d.dry_run.job import Job, dry_run
from lightning_3d.dry_run.rank import Batch
from lightning_3d.dry_run.record import Record
from lightning_3d.dry_run.report import DryRun, StageReport

__all__ = ["Batch", "DryRun", "Job", "Record", "StageReport", "dry_run"]
