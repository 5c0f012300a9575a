"""Finds losses and gradients that jump, without waiting for the device."""
