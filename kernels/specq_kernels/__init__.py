"""Triton kernels of specq; one file a kernel, each with its definition in plain torch.

Imports torch and triton only. Importing this package imports neither: take what is needed from its modules.
"""
