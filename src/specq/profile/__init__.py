"""Measures what verification costs on this device and chooses the pipeline: the planner's side of `auto`."""
