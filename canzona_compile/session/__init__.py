"""The steps of a wrapped optimizer: bind parameters, plan, choose and run programs, and keep the state."""
