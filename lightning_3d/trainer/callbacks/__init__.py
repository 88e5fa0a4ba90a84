"""Lightning's own callbacks, over ranks of which each holds a part of the model."""
