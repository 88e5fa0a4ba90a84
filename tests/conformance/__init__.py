"""What Lightning documents of its Trainer, played under one process and at layouts, and compared call by call."""
