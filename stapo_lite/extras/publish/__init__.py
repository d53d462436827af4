"""Publishing a run's adapter: export, model card, upload to the Hub."""
