"""Whole jobs: pre-training and fine-tuning, from a configuration to a run directory."""
