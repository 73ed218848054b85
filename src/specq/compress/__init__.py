"""Quantizing a model to 4 bits, layer by layer, with what it takes to be trusted: resume, report, evaluation."""
