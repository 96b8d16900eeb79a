"""Atropos environments that come with Lachesis."""
