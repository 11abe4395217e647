"""Parallel layouts for training and generation, and what lies between them."""
