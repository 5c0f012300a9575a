"""The fixture that runs commands."""

from tests.launching import command

__all__ = ["command"]
