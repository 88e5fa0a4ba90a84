"""Real 3D parallelism (tensor, pipeline and sharded data parallel) for PyTorch Lightning."""

__version__ = "0.1.0"
