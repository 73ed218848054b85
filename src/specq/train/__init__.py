"""Distillation: drafters trained on text that the target wrote."""
