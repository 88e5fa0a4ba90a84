"""What TensorBoard can do beyond a point on a curve: descriptions, a page of charts, pictures."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger

from lightning_3d.monitor.tags import CHARTS, DESCRIPTIONS
from lightning_3d.pictures import Drawing, png

_PICTURED = "What the stages of the first replica did in one step; also in the log folder, as SVG and as a trace."
_SCALE = 1.5


class TensorBoardPages:
    """Describes the curves of one logger once, lays out its page of custom charts, and adds pictures.

    Args:
        logger: Lightning's logger, used on rank 0.
    """

    def __init__(self, logger: TensorBoardLogger) -> None:
        self.logger = logger
        self._described: set[str] = set()

    @classmethod
    def of(cls, logger: Logger) -> TensorBoardPages | None:
        """The pages of a logger, if it writes for TensorBoard through torch."""
        writes = isinstance(logger, TensorBoardLogger) and hasattr(logger.experiment, "_get_file_writer")
        return cls(logger) if writes and isinstance(logger, TensorBoardLogger) else None

    def lay_out(self) -> None:
        """Fill the page "Custom scalars"."""
        self.logger.experiment.add_custom_scalars(
            {
                category: {title: ["Multiline", list(tags)] for title, tags in charts.items()}
                for category, charts in CHARTS.items()
            }
        )

    def scalars(self, values: dict[str, float], step: int) -> dict[str, float]:
        """Write the first point of every curve that has a description, with it; gives those that are left to log."""
        new = {tag: value for tag, value in values.items() if tag in DESCRIPTIONS and tag not in self._described}
        self._described |= new.keys()
        if new:
            self._write([_described(tag, value) for tag, value in new.items()], step)
        return {tag: value for tag, value in values.items() if tag not in new}

    def picture(self, drawing: Drawing, step: int) -> None:
        """Add a picture to the page "Images"."""
        messages = _messages()
        image = messages.Summary.Image(
            height=round(drawing.height * _SCALE),
            width=round(drawing.width * _SCALE),
            colorspace=3,
            encoded_image_string=png(drawing, _SCALE),
        )
        metadata = messages.SummaryMetadata(summary_description=_PICTURED)
        self._write([messages.Summary.Value(tag="step/timeline", image=image, metadata=metadata)], step)

    def _write(self, values: list[Any], step: int) -> None:
        self.logger.experiment._get_file_writer().add_summary(_messages().Summary(value=values), step)


def _described(tag: str, value: float) -> Any:
    messages = _messages()
    metadata = messages.SummaryMetadata(
        plugin_data=messages.SummaryMetadata.PluginData(plugin_name="scalars"), summary_description=DESCRIPTIONS[tag]
    )
    return messages.Summary.Value(tag=tag, simple_value=value, metadata=metadata)


def _messages() -> Any:
    """TensorBoard's own messages; it is there wherever torch's ``SummaryWriter`` is."""
    from tensorboard.compat.proto import summary_pb2  # type: ignore[import-untyped]

    return summary_pb2
