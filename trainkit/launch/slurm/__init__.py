"""A task of an srun as a rank: step (rank, world, rendezvous from Slurm's variables, its signals),
nodes (its lists).
"""
