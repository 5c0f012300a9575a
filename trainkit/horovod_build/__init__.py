"""Builds Horovod's last release against today's torch: finds the parts, applies the patches, compiles, checks."""
