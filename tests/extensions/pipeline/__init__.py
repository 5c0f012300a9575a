"""Tests of the extension pipeline."""
