"""GPU kernels, one operation per file: Triton kernel, wrapper and plain torch reference."""
