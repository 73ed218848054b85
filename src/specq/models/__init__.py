"""The decoder, its cache, and how both are loaded."""
