"""Real 3D parallelism (tensor, pipeline and sharded data parallel) for PyTorch Lightning.

Importing the package registers the strategies ``"3d"``, ``"3d_zero2"`` and ``"3d_zero3"`` with Lightning.
"""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_3d.errors import CheckpointError, ConfigError, PlanError, StageError, ThreeDError
from lightning_3d.lr_scaling import BatchScaledLR
from lightning_3d.monitor.monitor import ThreeDMonitor
from lightning_3d.monitor.prometheus import ThreeDPrometheus
from lightning_3d.monitor.ranges import NVTXRanges, ThreeDProfiler
from lightning_3d.precision import ThreeDPrecision
from lightning_3d.strategy import ThreeDStrategy
from lightning_3d.trainer.logging.run_report import RunReport
from lightning_3d.trainer.setup.layout import Layout

__all__ = [
    "BatchScaledLR",
    "CheckpointError",
    "ConfigError",
    "Layout",
    "NVTXRanges",
    "PlanError",
    "RunReport",
    "StageError",
    "ThreeDError",
    "ThreeDMonitor",
    "ThreeDPrecision",
    "ThreeDProfiler",
    "ThreeDPrometheus",
    "ThreeDStrategy",
]
__version__ = "0.1.0"

for _name, _stage in (("3d", 1), ("3d_zero2", 2), ("3d_zero3", 3)):
    StrategyRegistry.register(
        _name,
        ThreeDStrategy,
        description=f"Tensor, pipeline and data parallelism with ZeRO stage {_stage}",
        override=True,
        zero_stage=_stage,
    )
