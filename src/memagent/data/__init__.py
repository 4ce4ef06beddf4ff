"""Data: examples with known answers and known places of their evidence, made from sources."""
