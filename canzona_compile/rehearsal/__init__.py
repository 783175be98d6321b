"""Rehearsals: an optimizer in miniature, stepped plainly and in cells, to see in which way it may run."""
