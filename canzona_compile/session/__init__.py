"""A wrapped optimizer from step to step: binding, planning, choosing programs, running them, keeping state."""
