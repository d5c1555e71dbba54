"""The step, the loop that repeats it, and the checkpoints."""
