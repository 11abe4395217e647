"""KL estimators: values of peers, and what they and their gradients estimate, by enumeration."""

from __future__ import annotations

import pytest
import torch

from hpcflow.algorithms.kl import ESTIMATORS, estimate
from tests.algorithms import oracles


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("library", ["verl", "openrlhf"])
def test_values_and_gradients_of_peers(library, name):
    expected = oracles.output(library, f"kl/{name}")
    log_probs = oracles.tensor("logprobs").requires_grad_()
    result = estimate(name, log_probs, oracles.tensor("ref_logprobs"))
    result.sum().backward()
    torch.testing.assert_close(result.detach(), torch.tensor(expected["value"]), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(log_probs.grad, torch.tensor(expected["grad_logprobs"]), rtol=1e-5, atol=1e-6)


def distributions():
    policy = torch.tensor([0.3, -1.2, 0.8, 0.0, -0.5], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.1, -0.7, 0.4, 0.6, -0.9], dtype=torch.float64).log_softmax(0)
    return policy, policy.log_softmax(0), reference


def test_expected_values():
    _, log_p, log_r = distributions()
    log_p = log_p.detach()
    exact = float((log_p.exp() * (log_p - log_r)).sum())
    expected = {name: float((log_p.exp() * f(log_p, log_r)).sum()) for name, f in ESTIMATORS.items()}
    assert expected["k1"] == pytest.approx(exact, abs=1e-12)
    assert expected["k3"] == pytest.approx(exact, abs=1e-12)
    assert expected["k2"] != pytest.approx(exact, rel=0.01)


@pytest.mark.parametrize(
    ("name", "divergence"),
    [
        ("k1", lambda p, r: 0 * p.sum()),
        ("k2", lambda p, r: (p.exp() * (p - r)).sum()),
        ("k3", lambda p, r: (r.exp() * (r - p)).sum()),
    ],
)
def test_expected_gradients(name, divergence):
    """Samples are drawn from the policy, the drawing itself is not differentiated: what a loss sees."""
    logits, log_p, log_r = distributions()
    (sampled,) = torch.autograd.grad((log_p.exp().detach() * estimate(name, log_p, log_r)).sum(), logits)
    logits, log_p, log_r = distributions()
    (exact,) = torch.autograd.grad(divergence(log_p, log_r), logits)
    torch.testing.assert_close(sampled, exact, rtol=0, atol=1e-12)


def test_k3_is_never_negative_and_finite():
    r = torch.cat([torch.linspace(-500, 500, 2001), torch.linspace(-1e-3, 1e-3, 2001)])
    values = estimate("k3", r, torch.zeros_like(r))
    assert (values >= 0).all() and torch.isfinite(values).all()


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="kl='low_var' is not known; it must be k1, k2, k3"):
        estimate("low_var", torch.zeros(1), torch.zeros(1))
