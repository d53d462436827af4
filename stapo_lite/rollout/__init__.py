"""Rollouts: one protocol, several engines."""
