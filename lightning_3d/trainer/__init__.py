"""What stands between the Lightning Trainer and the engine: data, logged values, module state, processes."""
