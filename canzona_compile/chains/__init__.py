"""Several optimizers as one."""
