"""A storm: an elastic job on simulated hosts, a random sequence of faults,
and what must hold after it.
"""
