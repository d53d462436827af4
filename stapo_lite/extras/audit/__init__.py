"""A page about a run's tokens, the log that it is made from, and pictures of a run."""
