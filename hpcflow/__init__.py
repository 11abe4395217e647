"""hpcflow: a Slurm-native batch toolkit for RL post-training of large language models."""
