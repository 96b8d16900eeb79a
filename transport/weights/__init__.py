"""Lossless weight deltas: codec, version log, channels and membership."""
