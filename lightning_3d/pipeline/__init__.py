"""The pipeline: how a model is cut into stages, and the engine that runs the actions of a schedule on one of them."""
