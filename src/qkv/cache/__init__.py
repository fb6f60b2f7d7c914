"""KV caches: `spec` says what a model must keep, a layout where it lies, a codec how. No torch."""
