"""Rewards on the training side: calling reward functions, comparing answers, judging with language models, rewarding teaching."""
