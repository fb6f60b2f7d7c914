"""Models that generation can run, one module per way to run them."""
