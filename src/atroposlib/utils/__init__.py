"""Helpers environments import by name: tokenization, advantages, parsing, message histories."""
