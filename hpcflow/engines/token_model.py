"""A Hugging Face model with one head, as the training engines run it: padded tokens in, one number per
position out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from hpcflow.engines.batching import Padded
from hpcflow.engines.pretrained import Weights, architecture

HEADS = ("lm", "value", "score")
LOGIT_CHUNK = 2**26
"""Logits held at once (elements). Longer batches go through the vocabulary in pieces, recomputed in
backward."""


class TokenModel(nn.Module):
    """``forward(batch) -> float32``: head "lm": log-prob of each target [T]; "value": value at each read
    position [T]; "score": a sequence classifier's single logit per row [rows].

    Dropout is off, also in training: the ratio of new to old log-probs must start at exactly 1.
    """

    def __init__(self, hf: nn.Module, head: str, temperature: float = 1.0) -> None:
        super().__init__()
        assert head in HEADS
        self.hf, self.head, self.temperature = hf.eval(), head, temperature
        if head == "value":
            # Zero, so that the first advantages are the rewards themselves and not noise of a random head.
            self.value_head = nn.Linear(hf.config.get_text_config().hidden_size, 1)
            nn.init.zeros_(self.value_head.weight)
            nn.init.zeros_(self.value_head.bias)

    def layers(self) -> list[nn.Module]:
        """The repeated blocks, which are sharded and gathered one at a time."""
        names = set(self.hf._no_split_modules or ())
        return [module for module in self.hf.modules() if type(module).__name__ in names]

    def forward(self, batch: Padded) -> torch.Tensor:
        body = self.hf if self.head == "value" else self.hf.base_model
        hidden = body(input_ids=batch.input_ids, use_cache=False)[0].flatten(0, 1)
        if self.head == "score":
            return _column(self.hf.score(hidden[batch.last]))
        hidden = hidden[batch.read]
        if self.head == "value":
            return _column(self.value_head(hidden.float()))
        return self._log_probs(hidden, batch.targets)

    def _log_probs(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        head = self.hf.get_output_embeddings()
        size = max(1, LOGIT_CHUNK // head.weight.shape[0])
        if len(targets) <= size:
            return log_probs(head, hidden, targets, self.temperature)
        pieces = zip(hidden.split(size), targets.split(size), strict=True)
        return torch.cat(
            [checkpoint(log_probs, head, h, t, self.temperature, use_reentrant=False) for h, t in pieces]
        )


def _column(outputs: torch.Tensor) -> torch.Tensor:
    """[n, 1] -> float32 [n], copied: changing a view of a sharded module's output in place would lose its
    hook."""
    return outputs[:, 0].float().clone()


def log_probs(
    head: nn.Module, hidden: torch.Tensor, targets: torch.Tensor, temperature: float
) -> torch.Tensor:
    """float32 [T]: log softmax(head(hidden) / temperature) at ``targets`` (int64 [T]); hidden [T, h]."""
    logits = head(hidden).float()
    if temperature != 1.0:
        logits = logits / temperature
    return -functional.cross_entropy(logits, targets, reduction="none")


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars, and no warning that a value model leaves the folder's lm_head unused."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def load(path: str, head: str, trust_remote_code: bool = False) -> tuple[nn.Module, Weights]:
    """The Hugging Face model in ``path`` for ``head``, its float32 parameters on the meta device, and the
    weights that belong in it.

    ValueError when the folder lacks weights that the head needs (they would be random, and different on every
    rank), or when the architecture changes logits after its head in a way that `TokenModel` does not repeat.
    """
    import transformers

    auto = {
        "lm": transformers.AutoModelForCausalLM,
        "value": transformers.AutoModel,
        "score": transformers.AutoModelForSequenceClassification,
    }[head]
    with quiet_transformers(), torch.random.fork_rng(devices=[]):
        hf = architecture(auto, path, trust_remote_code)
    weights = Weights(path, hf)
    if weights.missing:
        missing = ", ".join(weights.missing[:4])
        raise ValueError(f"{path} has no weights for {missing}: it was not saved as {auto.__name__}")
    config = hf.config.get_text_config()
    for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if head == "lm" and getattr(config, name, None) not in (None, 1, 1.0):
            raise ValueError(f"{path}: {name}={getattr(config, name)} is not supported; 1 or null works")
    if head == "score":
        if not hasattr(hf, "score"):
            raise ValueError(f"{path}: {type(hf).__name__} has no linear `score` head over its last token")
        if hf.config.num_labels != 1:
            raise ValueError(f"{path}: num_labels={hf.config.num_labels}; a reward model has num_labels=1")
    return hf, weights
