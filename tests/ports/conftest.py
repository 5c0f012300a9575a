"""The fixture that runs commands."""

from tests.helpers.launching import command

__all__ = ["command"]
