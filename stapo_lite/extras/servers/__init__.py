"""Rollouts from vLLM servers: the server command, and the engine that sends requests."""
