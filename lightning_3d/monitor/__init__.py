"""What a run does, made visible: figures, pictures, traces and reports from the one source of timings."""
