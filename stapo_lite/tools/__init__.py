"""Around a run: token audit, export, the quickstart's model."""
