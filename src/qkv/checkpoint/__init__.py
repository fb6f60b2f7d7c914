"""Saved models: reading and writing their files. No torch: tensors are NumPy arrays, mapped from disk."""
