"""Benchmarks: one file each, each prints a ratio to its limit."""
