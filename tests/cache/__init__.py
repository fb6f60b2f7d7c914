"""KV caches: codecs and layouts against the oracle, which has none."""
