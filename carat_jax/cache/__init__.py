"""Ring and linear caches, and the bank that holds them: floor 2."""
