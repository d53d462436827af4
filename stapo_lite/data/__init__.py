"""From rows to prompts; the benchmarks; contamination."""
