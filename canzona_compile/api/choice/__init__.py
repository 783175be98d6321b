"""Which parameters of a model a matrix optimizer should train: its hidden matrices, and why the others are others."""
