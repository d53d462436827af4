"""STAPO: reinforcement learning of LoRA adapters that leaves out spurious tokens (arXiv 2602.15620)."""

__version__ = "0.1.0"
