"""Command-line entry points; each module parses its arguments before it imports anything heavy."""
