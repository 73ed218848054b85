"""4-bit weight formats and the linear layer that runs on them."""
