"""The command that measures which kernels are fastest on this GPU."""
