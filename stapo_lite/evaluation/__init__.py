"""From benchmarks to scores."""
