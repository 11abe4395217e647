"""Batches and losses for engine tests, and plain single-process oracles without padding or sharding."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional
from transformers import AutoModel, AutoModelForCausalLM

from hpcflow.config import Optimizer, TrainingProtocol
from hpcflow.data.columns import Columns, Ragged, select_rows
from hpcflow.data.models import resolve_model

VOCAB = 64
TINY = f"random:llama?vocab_size={VOCAB}&hidden_size=32&layers=2&heads=4&kv_heads=2&vocab=words"
OPTIMIZER = Optimizer(lr=3e-3, eps=1e-4, betas=(0.9, 0.95), weight_decay=0.1, clip_norm=0.5, warmup_updates=3)


def tiny(**changes: object) -> str:
    return str(resolve_model("&".join([TINY, *(f"{k}={v}" for k, v in changes.items())])))


def protocol(**changes: object) -> TrainingProtocol:
    return TrainingProtocol(
        **{"dtype": "float32", "micro_batch": 2, "reshard_after_forward": False, **changes}
    )


def batch(rows: int, seed: int = 0, vocab: int = VOCAB) -> Columns:
    """Ragged prompts of 1-6 and responses of 0-7 tokens with everything that the losses below read."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, size: int) -> torch.Tensor:
        return torch.randint(low, high, (size,), generator=generator)

    prompts = [draw(4, vocab, int(draw(1, 7, 1))) for _ in range(rows)]
    lengths = draw(1, 8, rows)
    lengths[1::4] = 0
    tokens = int(lengths.sum())
    return {
        "prompt_ids": Ragged.from_lists(prompts, torch.int64),
        "response_ids": Ragged(draw(4, vocab, tokens), lengths),
        "advantages": Ragged(torch.randn(tokens, generator=generator), lengths),
        "old": Ragged(torch.randn(tokens, generator=generator) - 4, lengths),
        "loss_mask": Ragged(torch.rand(tokens, generator=generator) > 0.2, lengths),
    }


def policy_loss(log_probs: torch.Tensor, rows: Columns) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    advantages, old = rows["advantages"].values, rows["old"].values
    ratio = (log_probs - old).clamp(max=1).exp()
    loss = (
        -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) + 0.1 * (log_probs - old) ** 2
    )
    return loss, {"ratio": ratio, "mass": log_probs.exp().sum()}


def value_loss(values: torch.Tensor, rows: Columns) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return (values - rows["advantages"].values) ** 2, {"value": values}


class Oracle:
    """One Hugging Face model in one process: row by row, torch's AdamW and clipping."""

    def __init__(self, path: str, head: str, optimizer: Optimizer = OPTIMIZER) -> None:
        auto = AutoModelForCausalLM if head == "lm" else AutoModel
        self.head, self.config, self.steps = head, optimizer, 0
        self.hf = auto.from_pretrained(path, dtype=torch.float32).eval()
        self.names = dict(self.hf.named_parameters())
        if head == "value":
            self.names["value_head.weight"] = torch.nn.Parameter(torch.zeros(1, self.hf.config.hidden_size))
            self.names["value_head.bias"] = torch.nn.Parameter(torch.zeros(1))
        self.adam = torch.optim.AdamW(
            self.names.values(),
            lr=optimizer.lr,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
        )

    def outputs(self, rows: Columns, row: int) -> torch.Tensor:
        prompt, response = (rows[name].split()[row] for name in ("prompt_ids", "response_ids"))
        ids = torch.cat([prompt, response])[None]
        read = slice(len(prompt) - 1, len(prompt) - 1 + len(response))
        if self.head == "value":
            hidden = self.hf(input_ids=ids)[0][0, read]
            return functional.linear(hidden, self.names["value_head.weight"], self.names["value_head.bias"])[
                :, 0
            ]
        return self.hf(input_ids=ids).logits[0, read].log_softmax(-1).gather(1, response[:, None])[:, 0]

    def column(self, rows: Columns) -> list[torch.Tensor]:
        with torch.no_grad():
            return [self.outputs(rows, row) for row in range(len(rows["prompt_ids"]))]

    def step(self, rows: Columns, loss: Callable, agg: str) -> dict[str, float]:
        """One optimizer step on one mini-batch."""
        total, metrics, tokens, used = torch.zeros(()), {}, 0, 0
        per_row = []
        for row in range(len(rows["prompt_ids"])):
            part = select_rows(rows, torch.tensor([row]))
            values, seen = loss(self.outputs(rows, row), part)
            mask = part["loss_mask"].values
            per_row.append((values[mask], mask))
            tokens, used = tokens + int(mask.sum()), used + bool(mask.any())
            for name, value in seen.items():
                metrics[name] = metrics.get(name, 0.0) + float(
                    value.detach()[mask].sum() if value.dim() else value.detach()
                )
        for values, mask in per_row:
            if mask.any():
                total = total + (values.sum() / tokens if agg == "token-mean" else values.mean() / used)
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.names.values(), self.config.clip_norm)
        lr = self.config.lr * min(1, (self.steps + 1) / self.config.warmup_updates)
        self.adam.param_groups[0]["lr"] = lr
        self.adam.step()
        self.adam.zero_grad()
        self.steps += 1
        found = {"loss": float(total.detach()), "grad_norm": float(norm), "lr": lr, "tokens": float(tokens)}
        return {**found, "rows": float(len(per_row)), **{k: v / tokens for k, v in metrics.items()}}
