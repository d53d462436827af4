"""The memory that a run needs, and changes that make it fit."""
