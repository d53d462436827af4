"""A run's adapter as something to publish: exported, with a model card, on the Hub."""
