"""The run: loop, update, metrics, checkpoints, the run folder, and what is published of it."""
