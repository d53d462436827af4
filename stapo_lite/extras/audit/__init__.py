"""A page about a run's tokens, the token log behind it, and charts."""
