"""KV caches. So far `spec`: what a cache must hold, from the config alone."""
