"""From an optimizer's eager `step` to functional graphs, one per kind of parameter."""
