"""Launching roles on one node: supervision, the live panel, summary and report."""
