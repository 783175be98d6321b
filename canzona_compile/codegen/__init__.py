"""Generated kernels: pointwise graphs of many tensors as one grouped Triton kernel."""
