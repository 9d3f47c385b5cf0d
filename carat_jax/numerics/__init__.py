"""Pure functions: floor 1."""
