"""Measures the rates of a machine that predictions stand on."""
