"""launcher=kubernetes: a fit as a Job, JobSet, TrainJob, MPIJob or RayJob."""
