"""Tests of `qkv.config`."""
