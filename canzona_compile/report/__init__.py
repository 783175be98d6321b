"""What people and machines read of a plan: figures, their text, and what became of every parameter."""
