"""Batches on their way from the loader to the step, and outputs on their way back."""
