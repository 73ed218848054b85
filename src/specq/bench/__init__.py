"""Measurements on real prompts, and what they are compared with."""
