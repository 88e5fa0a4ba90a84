"""Step time and memory of this package beside stock Lightning and beside parallelism written by hand."""
