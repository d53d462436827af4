"""A small model and a task that it learns within minutes on a CPU."""
