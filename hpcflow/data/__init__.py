"""Prompts, tokenizers, rewards; columns and ids, on which every other layer stands."""
