"""What `trainkit doctor` looks at, and what it finds wrong, each with what mends it. Imports no torch: it asks a new Python.

software.py   Python, torch, torchvision, trainkit's own dependencies
horovod.py    Horovod: its build, its parts
gpus.py       GPUs, driver, NCCL
host.py       cores, memory, shared memory, limits, disk, loader workers
network.py    interfaces, the host's own name, what the environment says
sums.py       a real allreduce of two ranks, with its bandwidth
"""
