"""Reinforcement-learning environments as services; importing the package itself costs nothing."""

__version__ = "0.1.0"
