"""Tokenizers with a repaired chat template."""
