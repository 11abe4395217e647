"""MPI: the world, its launcher, sub-communicators, calls and point-to-point transfers."""
