"""From text to verdict and reward. No torch."""
