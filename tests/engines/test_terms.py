"""Several terms of a loss: their gradients add up, with their weights, each normalised by its own counts."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from hpcflow.config import Optimizer
from hpcflow.data.columns import Columns, select_rows
from hpcflow.engines.objective import Term
from tests.engines.batches import batch, policy_loss, tiny
from tests.engines.ranks import run_ranks
from tests.engines.test_fsdp import make, weights

OPTIMIZER = Optimizer(lr=1e-2, eps=1e-4, clip_norm=1e9)


def nll(log_probs: torch.Tensor, rows: Columns) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return -log_probs, {"unseen": torch.ones_like(log_probs)}


def own(rows: Columns) -> tuple[Columns, torch.Tensor]:
    """This rank's rows: the first ranks have more, the last may have none."""
    size = -(-len(rows["prompt_ids"]) // dist.get_world_size()) + 1
    index = torch.arange(len(rows["prompt_ids"]))[dist.get_rank() * size : (dist.get_rank() + 1) * size]
    return select_rows(rows, index), torch.arange(len(index))


def train(weight: float) -> dict[str, Any]:
    engine = make("lm", OPTIMIZER)
    (rows, index), (texts, other) = own(batch(7, 0)), own(batch(5, 1))
    beside = [Term("text", texts, [other], nll, weight=weight)] if weight else []
    (facts,) = engine.train(rows, [index], policy_loss, "token-mean", beside)
    return {"facts": facts, "weights": weights(engine), "version": engine.version}


def by_hand(weight: float) -> tuple[float, float, float]:
    """(main loss, text loss, gradient norm) by autograd on the plain model, row by row."""
    model = AutoModelForCausalLM.from_pretrained(tiny(), dtype=torch.float32)

    def mean(rows: Columns, loss: Any) -> torch.Tensor:
        parts = []
        for row in range(len(rows["prompt_ids"])):
            one = select_rows(rows, torch.tensor([row]))
            prompt, response = one["prompt_ids"].values, one["response_ids"].values
            logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
            found = logits.log_softmax(-1).gather(1, response[:, None])[:, 0]
            parts.append(loss(found, one)[0][one["loss_mask"].values])
        return torch.cat(parts).mean()

    main, text = mean(batch(7, 0), policy_loss), mean(batch(5, 1), nll)
    (main + weight * text).backward()
    norm = torch.stack([p.grad.square().sum() for p in model.parameters() if p.grad is not None]).sum().sqrt()
    return float(main.detach()), float(text.detach()), float(norm)


def test_a_weighted_term_adds_to_loss_and_gradient() -> None:
    main, text, norm = by_hand(0.3)
    for ranks in (1, 3):
        for found in run_ranks(ranks, train, 0.3):
            facts = found["facts"]
            expected = torch.tensor([main + 0.3 * text, text, norm])
            assert torch.allclose(
                torch.tensor([facts["loss"], facts["text"], facts["grad_norm"]]), expected, rtol=1e-5
            )
            assert facts["rows"] == 7 and "unseen" not in facts and found["version"] == 1


def test_the_main_term_is_as_if_it_were_alone() -> None:
    """Without further terms; and its metrics and counts do not see them."""
    (alone,), (together,) = run_ranks(1, train, 0.0), run_ranks(1, train, 0.3)
    assert alone["facts"].keys() | {"text"} == together["facts"].keys()
    for name in ("tokens", "rows", "ratio"):
        assert alone["facts"][name] == together["facts"][name]
    assert any(not torch.equal(w, together["weights"][name]) for name, w in alone["weights"].items())
