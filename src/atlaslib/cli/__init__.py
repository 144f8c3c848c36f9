"""Command-line entry points of the torch side; each module parses its arguments before it imports torch."""
