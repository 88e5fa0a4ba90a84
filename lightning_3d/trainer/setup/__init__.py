"""Before the first batch: which layout, whether it can work, how ranks start and how the module is laid out."""
