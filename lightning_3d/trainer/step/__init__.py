"""One batch, from Lightning's call to the engine and back, and what is decided or checked with it."""
