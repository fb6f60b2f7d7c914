"""The oracle against numbers worked out by hand, formulas per pair, and what must not matter."""
