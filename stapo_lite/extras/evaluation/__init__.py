"""From benchmarks to scores, in a command of its own or while a run goes on."""
