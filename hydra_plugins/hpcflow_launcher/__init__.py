"""Hydra's way to hpcflow's Slurm jobs: ``hydra/launcher=hpcflow`` in any Hydra application."""
