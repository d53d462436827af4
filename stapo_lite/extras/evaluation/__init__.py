"""Evaluation on benchmarks, as a command of its own or during a run."""
