"""Training and inference for language models by reinforcement learning (needs torch); importing the package itself costs nothing."""

__version__ = "0.1.0"
