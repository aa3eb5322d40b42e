"""Measurements; `python -m benchmarks.step` and so on."""
