"""hpcflow beside verl, OpenRLHF and TRL, case by case of tests/data_files/peer_oracles.json.

``CASES`` maps "library/case" to a function that computes hpcflow's side: {name: tensor as the library shapes
it}. The other side is the file's output of the same name ("" = the whole output). ``LEFT_OUT`` says of all
other cases why hpcflow does not compute the same. tools/oracle_table.py prints both."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from hpcflow.algorithms import statistics as s
from hpcflow.algorithms.advantages import gae, reinforce_pp, remax
from hpcflow.algorithms.group_advantages import grpo, rloo
from hpcflow.algorithms.kl import estimate
from hpcflow.algorithms.losses import clipped_value, gspo, ppo_clip
from hpcflow.data.columns import Columns, Ragged
from hpcflow.engines.batching import AGGREGATIONS, counts, token_weights
from hpcflow.engines.token_model import log_probs
from tests.algorithms import oracles
from tests.algorithms.oracles import ids, ragged, tensor

Side = dict[str, torch.Tensor]
GAMMA, LAM, KL = (oracles.constant(name) for name in ("gamma", "lam", "kl_coef"))
MASKS = ("mask_right", "mask_empty", "mask_holes")
SINGLETON = "the draw that has no other to compare with is 0 here"
CASES: dict[str, Callable[[], Side]] = {}
ADJUSTED: dict[str, tuple[Callable[[Any], Any], str]] = {}
"""Cases of which the library's output is changed before the comparison, and why."""


def alone(part: torch.Tensor) -> list[torch.Tensor]:
    return [part]


def expected(name: str) -> Side:
    """The library's side of a case."""
    library, _, case = name.partition("/")
    output = oracles.output(library, case)
    if name in ADJUSTED:
        output = ADJUSTED[name][0](output)
    side = {key: torch.tensor(output[key] if key else output) for key in CASES[name]()}
    if "/kl/" in name or "logits" in name:
        return side
    keep = tensor(next((mask for mask in MASKS if mask in name), "mask_right")) > 0
    # libraries differ in what they leave at tokens that do not count
    return {
        key: torch.where(keep, each, 0.0) if each.shape == keep.shape else each for key, each in side.items()
    }


def differences(name: str) -> dict[str, float]:
    """Largest absolute difference of a case, by what is compared."""
    other = expected(name)
    return {key: float((mine - other[key]).abs().max()) for key, mine in CASES[name]().items()}


def wide(column: Ragged, mask: str) -> torch.Tensor:
    """[6, 12], 0 in the padding."""
    out = torch.zeros(6, 12)
    padded = torch.where(
        column.like(ragged(tensor(mask) > 0, mask).values).to_padded(False), column.to_padded(0.0), 0.0
    )
    out[:, : padded.shape[1]] = padded
    return out


# -- advantages


def per_token(mask: str) -> Columns:
    """Rows whose KL cost spells the file's reward of each token: k1 = old - 0, coefficient 1."""
    rows = oracles.rows(mask)
    rows["old_log_probs"] = ragged(-tensor("rewards_tok"), mask)
    rows["ref_log_probs"] = ragged(torch.zeros(6, 12), mask)
    rows["reward"] = torch.zeros(6)
    return rows


def estimated(
    estimator: Callable, mask: str, groups: str, names: dict[str, str], rows: Columns, **params: Any
) -> Side:
    """An estimator's columns under the library's names."""
    made = estimator(ids(groups), rows, alone, **params)
    return {theirs: wide(made[ours], mask) for theirs, ours in names.items()}


def add_estimate(
    name: str,
    estimator: Callable,
    names: dict[str, str] | None = None,
    *,
    mask: str = "mask_right",
    groups: str = "group_equal",
    rows: Callable[[str], Columns] = oracles.rows,
    **params: Any,
) -> None:
    names = {"": "advantages"} if names is None else names
    CASES[name] = lambda: estimated(estimator, mask, groups, names, rows(mask), **params)


BOTH = {"advantages": "advantages", "returns": "returns"}
for mask in ("mask_right", "mask_holes"):
    add_estimate(
        f"verl/gae/{mask}",
        gae,
        {"advantages_whitened": "advantages", "returns": "returns"},
        mask=mask,
        rows=per_token,
        gamma=GAMMA,
        lam=LAM,
        kl_coef=1.0,
    )
    for gamma in (1.0, GAMMA):
        add_estimate(
            f"verl/reinforce_pp/{mask}/gamma={gamma:g}".replace("gamma=1", "gamma=1.0"),
            reinforce_pp,
            BOTH,
            mask=mask,
            rows=per_token,
            gamma=gamma,
            kl_coef=1.0,
        )
add_estimate(
    "openrlhf/gae/mask_right",
    gae,
    {"advantages_raw": "advantages", "returns": "returns"},
    rows=per_token,
    gamma=GAMMA,
    lam=LAM,
    kl_coef=1.0,
    whiten=False,
)
for kl_coef in (0.0, KL):
    more = {"kl_coef": kl_coef, "kl": "k1"}
    of = lambda kind, kl_coef=kl_coef: f"openrlhf/experience/{kind}/kl_coef={kl_coef}"
    add_estimate(of("gae"), gae, BOTH, gamma=GAMMA, lam=LAM, unbiased=False, **more)
    add_estimate(of("reinforce"), reinforce_pp, BOTH, gamma=GAMMA, unbiased=False, **more)
    add_estimate(of("reinforce_baseline"), reinforce_pp, BOTH, baseline=True, unbiased=False, **more)
    add_estimate(of("rloo"), rloo, BOTH, **more)
add_estimate("openrlhf/experience/group_norm/kl_coef=0.0", grpo, BOTH, eps=1e-9)
add_estimate("openrlhf/experience/dr_grpo/kl_coef=0.0", grpo, BOTH, scale="none")


def without_last(output: list) -> list:
    return [*output[:5], [0.0] * 12]


for groups in ("group_equal", "group_uneven"):
    add_estimate(f"verl/grpo/{groups}/std=True", grpo, groups=groups)
    add_estimate(f"verl/grpo/{groups}/std=False", grpo, groups=groups, scale="none")
    add_estimate(f"verl/rloo/{groups}", rloo, groups=groups)
    add_estimate(f"verl/rloo_vectorized/{groups}", rloo, groups=groups)
for name in ("verl/grpo/group_uneven/std=True", "verl/grpo/group_uneven/std=False", "verl/rloo/group_uneven"):
    ADJUSTED[name] = (without_last, SINGLETON)
add_estimate("verl/reinforce_pp_baseline/group_equal", reinforce_pp, baseline=True)


add_estimate("verl/remax", remax, BOTH)


def per_response(estimator: Callable, **params: Any) -> Side:
    made = estimator(ids("group_equal"), oracles.rows("mask_right"), alone, **params)["advantages"]
    return {"": torch.tensor([row[0] for row in made.tolist()])}


for scale in ("group", "batch", "none"):
    CASES[f"trl/grpo/group_equal/scale_rewards={scale}"] = functools.partial(
        per_response, grpo, scale=scale, eps=1e-4
    )
for normalize in (True, False):
    CASES[f"trl/rloo/group_equal/normalize={normalize}"] = functools.partial(
        per_response, rloo, normalize=normalize
    )

# -- losses


def aggregated(
    loss: Callable, predictions: str, rows: Columns, mask: str, agg: str, names: dict[str, str], **params: Any
) -> Side:
    """{"loss", the gradient under its name, token means of metrics}; ``names``: theirs -> our metric, or
    "grad"."""
    column = ragged(tensor(predictions), mask)
    flat = column.values.clone().requires_grad_()
    keep = rows["loss_mask"]
    tokens, full, _ = counts(keep)
    per_token, metrics = loss(flat, rows, **params)
    value = (per_token * token_weights(keep, agg, tokens, full)).sum()
    value.backward()
    side: Side = {}
    for theirs, ours in names.items():
        if ours == "loss":
            side[theirs] = value.detach()
        elif ours == "grad":
            side[theirs] = wide(column.like(flat.grad), mask)
        else:
            side[theirs] = metrics[ours][keep.values].sum() / tokens
    return side


def add_loss(
    name: str,
    loss: Callable,
    names: dict[str, str],
    *,
    mask: str = "mask_right",
    agg: str = "token-mean",
    predictions: str = "logprobs",
    rows: Callable[[str], Columns] = oracles.rows,
    **params: Any,
) -> None:
    CASES[name] = lambda: aggregated(loss, predictions, rows(mask), mask, agg, names, **params)


def wide_rows(mask: str) -> Columns:
    return oracles.rows(mask, old="old_logprobs_wide")


def sequence_rows(mask: str) -> Columns:
    """Rows with TRL's own advantages, one number a response."""
    advantage = torch.tensor(oracles.output("trl", "grpo/group_equal/scale_rewards=group"))
    return {**oracles.rows(mask), "advantages": ragged(advantage[:, None].expand(6, 12), mask)}


POLICY = {"loss": "loss", "grad_logprobs": "grad", "clipfrac": "clip_fraction"}
LOSS = {"loss": "loss", "grad_logprobs": "grad"}
THEIR_AGGREGATIONS = {
    **{agg: (agg, 1) for agg in AGGREGATIONS},
    "seq-mean-token-sum-norm": ("seq-mean-token-sum", 12),
}
for mask in MASKS:
    for theirs, (agg, length) in THEIR_AGGREGATIONS.items():
        for kind, high in (("sym", 0.2), ("asym", 0.28)):
            add_loss(
                f"verl/policy_loss/{kind}/{theirs}/{mask}",
                ppo_clip,
                {**POLICY, "ppo_kl": "approx_kl"},
                mask=mask,
                agg=agg,
                clip_high=high,
                dual_clip=3.0,
                length=length,
            )
        if length == 1:
            add_loss(
                f"verl/value_loss/{theirs}/{mask}",
                clipped_value,
                {"loss": "loss", "grad_values": "grad", "clipfrac": "value_clip_fraction"},
                mask=mask,
                agg=agg,
                predictions="values_new",
            )
        if theirs in ("token-mean", "seq-mean-token-mean"):
            for kind, high, dual in (("sym", 0.2, 3.0), ("asym", 0.28, 3.0), ("sym_nodual", 0.2, None)):
                add_loss(
                    f"openrlhf/policy_loss/{kind}/{theirs}/{mask}",
                    ppo_clip,
                    {**POLICY, "ppo_kl": "approx_kl"},
                    mask=mask,
                    agg=agg,
                    clip_high=high,
                    dual_clip=dual,
                )
            add_loss(
                f"openrlhf/value_loss/{theirs}/{mask}",
                clipped_value,
                {"loss": "loss", "grad_values": "grad"},
                mask=mask,
                agg=agg,
                predictions="values_new",
            )
for agg in AGGREGATIONS:
    add_loss(
        f"verl/policy_loss/wide/{agg}/mask_right", ppo_clip, POLICY, agg=agg, rows=wide_rows, dual_clip=3.0
    )
    if agg != "seq-mean-token-sum":
        add_loss(
            f"openrlhf/policy_loss/wide/{agg}/mask_right",
            ppo_clip,
            POLICY,
            agg=agg,
            rows=wide_rows,
            dual_clip=3.0,
        )
        add_loss(
            f"openrlhf/policy_loss/wide_nodual/{agg}/mask_right", ppo_clip, POLICY, agg=agg, rows=wide_rows
        )
for name in ("verl", "openrlhf"):
    add_loss(
        f"{name}/policy_loss_gspo", gspo, {"": "loss"}, agg="seq-mean-token-mean", clip=0.2, clip_high=0.28
    )
add_loss(
    "trl/grpo_loss/gspo(level=sequence)",
    gspo,
    LOSS,
    agg="seq-mean-token-mean",
    clip=0.2,
    clip_high=0.28,
    rows=sequence_rows,
)
TRL = {
    "grpo": ("seq-mean-token-mean", 1),
    "bnpo": ("token-mean", 1),
    "dapo": ("token-mean", 1),
    "dr_grpo": ("seq-mean-token-sum", 12),
}
for kind, (agg, length) in TRL.items():
    for beta in ("0.0", "0.04"):
        for advantages, rows in (("tok", oracles.rows), ("seq", sequence_rows)):
            add_loss(
                f"trl/grpo_loss/{kind}/beta={beta}/adv={advantages}",
                ppo_clip,
                LOSS,
                agg=agg,
                rows=rows,
                clip_high=0.28,
                kl_coef=float(beta),
                length=length,
            )
add_loss("trl_ppo/ppo_loss/token-mean/mask_right", ppo_clip, {"pg_loss": "loss", "grad_logprobs": "grad"})


def agg_loss(agg: str, mask: str, length: int) -> Side:
    keep = oracles.rows(mask)["loss_mask"]
    weights = token_weights(keep, agg, *counts(keep)[:2])
    return {"": (ragged(tensor("advantages"), mask).values * weights).sum() / length}


def agg_loss_of_ranks(agg: str) -> Side:
    """Each of two ranks computes its rows with the global counts; verl's is times 2, for a mean over
    ranks."""
    mask = oracles.rows("mask_right")["loss_mask"]
    values, (tokens, full, _) = ragged(tensor("advantages"), "mask_right"), counts(mask)
    shares = [
        (values.rows(lo, lo + 3).values * token_weights(mask.rows(lo, lo + 3), agg, tokens, full)).sum()
        for lo in (0, 3)
    ]
    return {"rank0": 2 * shares[0], "rank1": 2 * shares[1], "mean": shares[0] + shares[1]}


for agg in AGGREGATIONS:
    CASES[f"verl/agg_loss_dp2/{agg}"] = functools.partial(agg_loss_of_ranks, agg)
for mask in MASKS:
    for theirs, (agg, length) in THEIR_AGGREGATIONS.items():
        CASES[f"verl/agg_loss/{theirs}/{mask}"] = functools.partial(agg_loss, agg, mask, length)
        if theirs in ("token-mean", "seq-mean-token-mean"):
            CASES[f"openrlhf/agg_loss/{theirs}/{mask}"] = functools.partial(agg_loss, agg, mask, 1)

# -- pieces


def kl_case(kind: str) -> Side:
    new = tensor("logprobs").requires_grad_()
    value = estimate(kind, new, tensor("ref_logprobs"))
    value.sum().backward()
    return {"value": value.detach(), "grad_logprobs": new.grad}


for kind in ("k1", "k2", "k3"):
    CASES[f"verl/kl/{kind}"] = CASES[f"openrlhf/kl/{kind}"] = functools.partial(kl_case, kind)
    CASES[f"openrlhf/kl/{kind}+"] = functools.partial(kl_case, f"{kind}+")
CASES["verl/kl/k1+"], CASES["verl/kl/k3+"] = (
    functools.partial(kl_case, "k1+"),
    functools.partial(kl_case, "k3+"),
)
CASES["verl/kl/low_var_kl"] = functools.partial(kl_case, "k3")


def kl_rewards() -> Side:
    rows = oracles.rows("mask_right")
    mask = rows["loss_mask"]
    made = s.token_rewards(mask, rows["reward"], s.kl_column(rows, "k1", True), KL)
    return {"": wide(s.ragged(made, mask), "mask_right")}


def whitened() -> Side:
    mask = oracles.rows("mask_right")["loss_mask"]
    made = s.whitened(
        s.padded(ragged(tensor("advantages"), "mask_right"), mask), mask.to_padded(False), alone
    )
    return {"": wide(s.ragged(made, mask), "mask_right")}


def from_logits() -> Side:
    head = torch.nn.Linear(17, 17, bias=False)
    head.weight.data = torch.eye(17)
    made = log_probs(head, tensor("logits").flatten(0, 1), tensor("labels").long().flatten(), 1.0)
    return {"": made.detach().view(6, 12)}


CASES["verl/kl_rewards"] = CASES["openrlhf/kl_rewards"] = kl_rewards
CASES["verl/masked_whiten/shift=True"] = CASES["trl_ppo/masked_whiten/shift=True"] = whitened
for name in ("verl", "openrlhf", "trl"):
    CASES[f"{name}/logprobs_from_logits"] = from_logits

LEFT_OUT = {
    "verl/opo/": "OPO is not among hpcflow's algorithms",
    "verl/policy_loss_sapo": "SAPO is not among hpcflow's algorithms",
    "verl/policy_loss_cispo": "CISPO is not among hpcflow's algorithms",
    "verl/policy_loss_geo_mean": "the geometric-mean loss is not among hpcflow's algorithms",
    "verl/policy_loss_gpg": "GPG is not among hpcflow's algorithms",
    "trl/grpo_loss/cispo/": "CISPO is not among hpcflow's algorithms",
    "trl/grpo_loss/sapo/": "SAPO is not among hpcflow's algorithms",
    "trl/grpo_loss/luspo/": "LUSPO is not among hpcflow's algorithms",
    "trl/rloo_loss": "clips the ratio of responses; RLOO here clips that of tokens, as verl and OpenRLHF do",
    "trl_ppo/ppo_gae/": "TRL puts the reward one position after the last token and values one position more",
    "trl_ppo/masked_whiten/shift=False": "whitening that keeps the mean is not used",
    "verl/masked_whiten/shift=False": "whitening that keeps the mean is not used",
    "verl/reinforce_pp_baseline/group_uneven": "verl keeps the raw reward of a prompt with one "
    "draw, and whitening spreads it over all rows",
    "openrlhf/gae/mask_holes": "OpenRLHF decays once more at each excluded token; skipped here, as in verl",
    "openrlhf/experience/group_norm/kl_coef=0.05": "GRPO has its KL in the loss here",
    "openrlhf/experience/dr_grpo/kl_coef=0.05": "Dr. GRPO has no KL here",
    "openrlhf/cumulative_returns/": "without a mask's end: part of the experience/reinforce cases",
    "verl/kl/abs": "the absolute log-ratio is no estimate of a divergence",
    "verl/agg_loss/token-sum/": "a sum over tokens depends on the batch size; no algorithm here uses it",
    "verl/policy_loss/sym/token-sum/": "as agg_loss/token-sum",
    "verl/policy_loss/asym/token-sum/": "as agg_loss/token-sum",
    "verl/value_loss/token-sum/": "as agg_loss/token-sum",
    "verl/value_loss/seq-mean-token-sum-norm/": "a constant length is an option of the policy loss only",
    "verl/entropy": "there is no entropy bonus",
    "openrlhf/entropy": "there is no entropy bonus",
    "trl/entropy": "there is no entropy bonus",
    "verl/adaptive_kl": "the KL coefficient is constant",
    "openrlhf/adaptive_kl": "the KL coefficient is constant",
    "verl/seqlen_balanced/": "no part of an algorithm: rows go to ranks in order",
}
"""Beginnings of the names of all other cases: why hpcflow does not compute the same."""


def left_out(name: str) -> str | None:
    """Why a case is left out; None if it is not."""
    return (
        next((why for start, why in LEFT_OUT.items() if name.startswith(start)), None)
        if name not in CASES
        else None
    )
