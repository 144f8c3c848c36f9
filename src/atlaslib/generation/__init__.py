"""One protocol, several ways to sample completions."""
