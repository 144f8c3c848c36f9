"""Environments: ``BaseEnv`` (base.py), the loop that drives one (env_runner.py), servers, rewards, evaluation."""
