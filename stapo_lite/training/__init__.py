"""The run: loop, update, memory, metrics, checkpoints, the run folder."""
