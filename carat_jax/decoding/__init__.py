"""Jitted steps, sampling and speculation: floor 4."""
