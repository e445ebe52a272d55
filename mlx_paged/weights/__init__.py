"""Checkpoints on disk: their configuration, their precision, the demo model."""
