"""GPU kernels, one operation per file: a wrapper and a plain torch reference. Triton kernels are in files beside it.

A wrapper imports Triton only to run a Triton kernel, so everything else works without Triton.
"""
