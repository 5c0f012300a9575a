"""Slurm: submits a fit as a batch job (launcher=slurm), and finds the other tasks of an srun.

submit      config -> options (checked) -> script -> launcher (sbatch) -> jobs.jsonl in the run's folder
in the job  script: srun -> each task is one rank: step (rank, world, rendezvous from Slurm's variables), nodes (its lists)
            USR1 before the time limit -> checkpoint -> requeue: note_requeue, and the script's scontrol requeue
afterwards  jobs: the jobs of folders of runs, with their states from squeue or sacct
"""
