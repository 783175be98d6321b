"""Copies of optimizers: what they hold, what may be copied, and what is watched between steps."""
