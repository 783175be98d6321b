"""What users call: `wrap`, `wrap_cls`, and the handle on a wrapped optimizer."""
