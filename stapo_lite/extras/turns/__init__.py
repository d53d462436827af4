"""Completions of several turns: episodes, and chats with tools."""
