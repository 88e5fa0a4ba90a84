"""What is logged in steps and hooks, with which metrics, to which loggers, and what the user is told."""
