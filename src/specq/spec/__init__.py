"""Speculative decoding: trees, sampling, drafters, verification, pipelines."""
