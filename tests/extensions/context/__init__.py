"""Tests of the extension context."""
