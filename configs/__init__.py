"""Run configuration: schema, loading, presets, models."""
