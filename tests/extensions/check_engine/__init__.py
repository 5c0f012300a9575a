"""Tests of check-engine."""
