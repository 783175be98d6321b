"""Cells: what one rank steps by the optimizer's own code, and what every rank is shown of it."""
