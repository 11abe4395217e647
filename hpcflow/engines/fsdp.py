"""The FSDP2 engine: scores and trains token sequences with a model sharded over its pool.

Every rank holds a slice of every parameter (float32 when the model is trained) and some of the batch's rows.
Weights are gathered, in the compute dtype, layer by layer; gradients are summed in float32 and scattered
back. What a rank computes never depends on how rows were dealt out, beyond rounding: losses are normalised by
the global counts of the mini-batch, and all ranks run the same number of micro-batches, a rank without rows
on one padding token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hpcflow.data.columns import Columns, Ragged, select_rows
from hpcflow.engines import batching, sharded_state, sharding, token_model
from hpcflow.engines.adamw import ShardedAdamW, global_sum
from hpcflow.engines.objective import Loss, Term

if TYPE_CHECKING:
    from hpcflow.config import Optimizer, TrainingProtocol


@dataclass
class _Work:
    """One term of one mini-batch on this rank: its rows, in pieces, and the counts over all ranks."""

    term: Term
    part: Columns
    pieces: list[torch.Tensor]
    tokens: int = 0
    rows_with_tokens: int = 0
    rows: int = 0
    micro_batches: int = 0

    def counts(self) -> tuple[int, int, int, int]:
        """This rank's (counted tokens, rows with one, rows, pieces)."""
        return (*batching.counts(batching.loss_mask(self.part)), len(self.pieces))


class FSDPEngine:
    """A model on all ranks of the default process group; every method is collective over it.

    path: a local Hugging Face folder. head: "lm" (log-probs), "value" (a zero-initialised linear head on the
    last hidden states, kept in float32), "score" (a sequence classifier with one label). trainable: keep
    float32 masters, and moments if ``optimizer`` is given; otherwise parameters lie in the compute dtype.
    temperature: log-probs are those of the softmax at this sampling temperature. ValueError where the folder
    does not fit the head.

    protocol.reshard_after_forward = False keeps gathered weights until an update changes them: no gathering
    again for the next call, at the price of the whole model in the compute dtype on each rank.
    """

    def __init__(
        self,
        path: str,
        *,
        head: str,
        trainable: bool,
        protocol: TrainingProtocol,
        optimizer: Optimizer | None = None,
        temperature: float = 1.0,
        trust_remote_code: bool = False,
    ) -> None:
        assert dist.is_initialized(), "the host initialises the default process group"
        assert trainable or optimizer is None
        self.version = 0
        self.protocol = protocol
        self.world, self.rank = dist.get_world_size(), dist.get_rank()
        self.device = torch.device("cpu")
        if torch.cuda.is_available():
            self.device = torch.device("cuda", torch.cuda.current_device())
        hf, weights = token_model.load(path, head, trust_remote_code)
        self.model = token_model.TokenModel(hf, head, temperature)
        self.dtype = getattr(torch, protocol.dtype)
        if not trainable:
            for name, parameter in self.model.named_parameters():
                parameter.requires_grad_(False)
                if not name.startswith("value_head."):
                    parameter.data = parameter.data.to(self.dtype)
        sharding.shard(self.model, protocol, self.world, self.device)
        weights.read_into(hf)
        # Taken while sharded: gathering swaps the modules' attributes; these objects stay and get gradients.
        named = dict(self.model.named_parameters())
        self.parameters: dict[str, DTensor] = {name.removeprefix("hf."): p for name, p in named.items()}
        self._owned = sharding.owners(self.model, list(named))
        self._optimizer = ShardedAdamW(self.parameters, optimizer) if optimizer else None

    # -- scoring ---------------------------------------------------------------------------------------------

    def log_probs(self, rows: Columns) -> Ragged:
        """Log-prob of every response token, ragged float32 [rows]; needs prompt_ids and response_ids
        (int64)."""
        assert self.model.head == "lm"
        return self._infer(rows, rows["response_ids"].lengths)

    def values(self, rows: Columns) -> Ragged:
        """Value of the state before every response token, ragged float32 [rows]."""
        assert self.model.head == "value"
        return self._infer(rows, rows["response_ids"].lengths)

    def scores(self, rows: Columns) -> torch.Tensor:
        """Score of every row at its last token, float32 [rows]."""
        assert self.model.head == "score"
        return self._infer(rows, torch.ones(len(rows["response_ids"]), dtype=torch.int64)).values

    @torch.no_grad()
    def _infer(self, rows: Columns, lengths: torch.Tensor) -> Ragged:
        rows = {name: rows[name] for name in ("prompt_ids", "response_ids")}
        parts = self._parts(rows)
        total = int(self._gather([len(parts)]).max())
        outputs = []
        for index in range(total):
            batch = batching.pad(select_rows(rows, parts[index]) if index < len(parts) else _none(rows))
            outputs.append(self.model(batch.to(self.device)).cpu())
        return batching.to_row_order(parts, outputs[: len(parts)], lengths)

    def _parts(self, rows: Columns) -> list[torch.Tensor]:
        return batching.micro_batches(rows, self.protocol.micro_batch, self.protocol.micro_batch_tokens)

    def _gather(self, numbers: list[int]) -> torch.Tensor:
        """int64 [ranks, len(numbers)]."""
        mine = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        everyone = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(everyone, mine)
        return torch.stack(everyone).cpu()

    # -- training --------------------------------------------------------------------------------------------

    def train(
        self,
        rows: Columns,
        mini_batches: list[torch.Tensor],
        loss: Loss,
        agg: str = "token-mean",
        beside: Sequence[Term] = (),
    ) -> list[dict[str, float]]:
        """One update: an optimizer step for each mini-batch, then ``version`` is one higher.

        rows: this rank's part; ``mini_batches``: int64 indices into it, as many on every rank, any of them
        empty. Only tokens with loss_mask (all, where there is no such column) count. ``beside``: further
        summands of the loss, each over rows and mini-batches of its own. A mini-batch without a single
        counted token on any rank takes no step. Returns per mini-batch the metrics of ``loss`` averaged over
        the global tokens of ``rows``, the unweighted loss of each further term under its name, and loss,
        grad_norm (before clipping), lr, tokens, rows: equal on all ranks. FloatingPointError on all ranks,
        before the step, when a loss or the gradient is not finite or the gradient's norm exceeds
        protocol.explode_norm; with protocol.bad_step=skip such a mini-batch takes no step instead, and its
        only metrics beside tokens, rows and lr is skipped=1.
        """
        assert self._optimizer is not None, "the engine was made without an optimizer"
        terms = [Term("", rows, mini_batches, loss, agg), *beside]
        work = [_Work(term, part, self._parts(part)) for term in terms for part in term.parts()]
        everyone = self._gather([len(term.mini_batches) for term in terms])
        steps = len(mini_batches)
        assert (everyone == steps).all(), f"ranks disagree on the number of mini-batches: {everyone.tolist()}"
        sizes = self._gather([n for each in work for n in each.counts()]).view(self.world, len(work), 4)
        for each, total, most in zip(work, sizes.sum(0).tolist(), sizes.amax(0).tolist(), strict=True):
            each.tokens, each.rows_with_tokens, each.rows, each.micro_batches = *total[:3], most[3]
        facts, local = [], []
        for number in range(steps):
            mine = work[number::steps]
            main, counted = mine[0], [each for each in mine if each.tokens]
            fact = {"tokens": float(main.tokens), "rows": float(main.rows), "lr": self._optimizer.lr()}
            seen: dict[str, float] = {}
            values = [self._backward(each, each is counted[-1], seen) for each in counted]
            if counted:
                fact |= self._step(number, [(each.term, v) for each, v in zip(counted, values, strict=True)])
                if fact.get("skipped"):
                    seen = {}  # may not be finite
            else:
                fact |= {"loss": 0.0, "grad_norm": 0.0}
            facts.append(fact)
            local.append(seen)
        self.version += 1
        return self._merge(facts, local)

    def _backward(self, work: _Work, last_term: bool, metrics: dict[str, float]) -> float:
        """Accumulate the gradients of one term of a mini-batch, and sums over its tokens in ``metrics``.
        Returns this rank's share of the loss, unweighted."""
        term, value = work.term, 0.0
        for index in range(work.micro_batches):
            part = (
                select_rows(work.part, work.pieces[index]) if index < len(work.pieces) else _none(work.part)
            )
            last = last_term and index == work.micro_batches - 1
            self.model.set_requires_gradient_sync(last)
            if not self.protocol.reshard_after_forward:
                self.model.set_reshard_after_backward(last)
            outputs = self.model(batching.pad(part).to(self.device)).cpu()
            if index >= len(work.pieces):
                outputs.sum().backward()  # of nothing: zero, but it takes part in the scattering
                continue
            mask = batching.loss_mask(part)
            per_token, seen = term.loss(outputs, part)
            weights = batching.token_weights(mask, term.agg, work.tokens, work.rows_with_tokens)
            # where, not only a product: 0 * inf of a token that does not count would be NaN.
            share = (torch.where(mask.values, per_token, 0.0) * weights).sum()
            (share if term.weight == 1.0 else term.weight * share).backward()
            value += float(share.detach())
            for name, metric in ({} if term.name else seen).items():
                counts = torch.where(mask.values, metric.detach(), 0.0) if metric.dim() else metric.detach()
                metrics[name] = metrics.get(name, 0.0) + float(counts.sum())
        return value

    def _step(self, number: int, values: list[tuple[Term, float]]) -> dict[str, float]:
        """The optimizer's step after all terms of a mini-batch; ``values``: this rank's share of each."""
        *losses, squares = global_sum(
            [v for _, v in values] + [self._optimizer.local_norm() ** 2], self.device
        )
        found = {"loss": sum(term.weight * v for (term, _), v in zip(values, losses, strict=True))}
        found |= {term.name: v for (term, _), v in zip(values, losses, strict=True) if term.name}
        found["grad_norm"] = squares**0.5
        limit, skips = self.protocol.explode_norm, self.protocol.bad_step == "skip"
        bad = [f"{name} is {value}" for name, value in found.items() if not math.isfinite(value)]
        if limit and squares > limit**2:
            bad.append(f"grad_norm is {found['grad_norm']:g}, above protocol.training.explode_norm={limit:g}")
        if not bad:
            self._optimizer.step(found["grad_norm"])
            return found | ({"skipped": 0.0} if skips else {})
        self._optimizer.drop_gradients()
        if not skips:
            raise FloatingPointError(
                f"mini-batch {number} of update {self.version}: {bad[0]}; no step was taken. To go on "
                "without such mini-batches resume with protocol.training.bad_step=skip"
            )
        return {"skipped": 1.0}

    def _merge(self, facts: list[dict[str, float]], local: list[dict[str, float]]) -> list[dict[str, float]]:
        """Token means over all ranks; names come from the ranks that had rows."""
        everyone: list = [None] * self.world
        dist.all_gather_object(everyone, local)
        for number, fact in enumerate(facts):
            for name in sorted({name for ranks in everyone for name in ranks[number]}):
                total = sum(ranks[number].get(name, 0.0) for ranks in everyone)
                fact[name] = total / max(fact["tokens"], 1.0)
        return facts

    # -- weights ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def full_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, full tensor in the compute dtype), one layer gathered at a time: exactly the
        weights of the forward pass, valid until the next update. Tied weights come once."""
        release = self.protocol.reshard_after_forward
        for unit, names in self._owned:
            unit.unshard()
            for name in names:
                full = self.model.get_parameter(name).detach()
                # vLLM keeps what it is given until a layer is complete: memory that goes away needs a copy.
                yield name.removeprefix("hf."), full.clone() if release else full
            if release:
                unit.reshard()

    def weights_digest(self) -> str:
        """Hex digest of the stored weights: equal on all ranks, and for equal weights under every number
        of ranks."""
        return sharded_state.digest(self.parameters)

    def save(self, folder: Path | str) -> None:
        """Weights, optimizer and version, one file a rank, into ``folder``; collective."""
        sharded_state.save(Path(folder), self._state(), {"version": self.version, "steps": self._steps()})

    def snapshot(self) -> sharded_state.Snapshot:
        """What `save` would write, copied: its ``write(folder)`` may run in a thread while training goes
        on."""
        return sharded_state.snapshot(self._state(), {"version": self.version, "steps": self._steps()})

    def load(self, folder: Path | str) -> None:
        """Continue from what any number of ranks saved. ValueError when it does not fit this model."""
        counters = sharded_state.load(Path(folder), self._state())
        self.version = counters["version"]
        if self._optimizer:
            self._optimizer.set_steps(counters["steps"])
        for unit in sharding.units(self.model):
            unit.reshard()  # what was gathered before is stale

    def _state(self) -> sharded_state.Groups:
        return {"model": self.parameters, **(self._optimizer.state() if self._optimizer else {})}

    def _steps(self) -> int:
        return self._optimizer.steps if self._optimizer else 0

    def nbytes(self) -> dict[str, int]:
        """Bytes on this rank: "parameters" (its shards) and "optimizer" (its moments)."""
        shards = sum(p.to_local().numel() * p.to_local().element_size() for p in self.parameters.values())
        return {"parameters": shards, "optimizer": self._optimizer.nbytes() if self._optimizer else 0}


def _none(rows: Columns) -> Columns:
    return select_rows(rows, torch.zeros(0, dtype=torch.int64))
