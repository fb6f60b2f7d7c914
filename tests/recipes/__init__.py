"""Tests of the ready recipes."""
