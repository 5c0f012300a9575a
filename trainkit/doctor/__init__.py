"""The checks of `trainkit doctor`, each with the fault found and its remedy. Imports no torch: a
new Python process does.

software.py   Python, torch, torchvision, trainkit's own dependencies
gpus.py       GPUs, driver, NCCL
host.py       cores, memory, shared memory, limits, disk, loader workers
network.py    interfaces, the host's own name, environment variables
sums.py       a real allreduce of two ranks, with its bandwidth
"""
