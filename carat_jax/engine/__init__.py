"""Text, requests, scheduling and the engine: floor 5."""
