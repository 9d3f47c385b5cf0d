"""Benchmarks, each a program: floor 6."""
