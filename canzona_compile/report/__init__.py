"""Shows a plan to people and machines: its figures, their text, and how each parameter is updated."""
