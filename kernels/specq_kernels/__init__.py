"""Triton kernels of specq; one file a kernel, each with its definition in plain torch."""
