"""Tests of the source itself: who imports whom, what every variant has, and how files are written."""
