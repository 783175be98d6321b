"""GPU kernels, one operation per file: wrapper and plain torch reference; Triton kernels beside them, imported late.

Nothing here imports Triton before a Triton kernel is asked for, so that all of it works without Triton.
"""
