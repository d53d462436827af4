"""From rows to prompts."""
