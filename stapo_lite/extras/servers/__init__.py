"""Rollouts from vLLM servers: the server's command, and the engine that asks it."""
