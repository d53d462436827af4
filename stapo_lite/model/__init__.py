"""From weights to token statistics: loading, adapter, policy, processes."""
