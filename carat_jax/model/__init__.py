"""Flax modules and their storage: floor 3."""
