"""The version of trainkit."""

__version__ = "0.2.0"
