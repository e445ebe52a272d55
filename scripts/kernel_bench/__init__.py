"""The parts of scripts/kernel.py."""
