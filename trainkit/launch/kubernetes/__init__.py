"""launcher=kubernetes: a fit as a Job, JobSet, MPIJob or RayJob."""
