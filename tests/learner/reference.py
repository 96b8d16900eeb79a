"""The objective on one page, in float64: loops over tokens, no masks, no packing, nothing shared with learner/."""

from __future__ import annotations

import math

import numpy as np


def token(name, *, pi, prox, mu, a, low=0.2, high=0.28, cap=None, delta=0.2, kappa=1e-3):
    """L, dL/d(log pi) and whether the correction cut the gradient, of one token (pi, prox, mu: log-probs)."""
    rho, r, b = math.exp(pi - mu), math.exp(pi - prox), math.exp(prox - mu)
    surrogate = -min(r * a, min(max(r, 1 - low), 1 + high) * a)
    cut = (a > 0 and r > 1 + high) or (a < 0 and r < 1 - low)
    slope = 0.0 if cut else -r * a
    if name == "none":
        return -a * pi, -a, False
    if name == "ppo":
        return surrogate, slope, cut
    if name == "tis":
        weight = min(b, 2.0 if cap is None else cap)
        return weight * surrogate, weight * slope, cut
    if name == "decoupled":
        weight = b if b <= (5.0 if cap is None else cap) else 0.0
        return weight * surrogate, weight * slope, cut or weight == 0.0
    if name == "dppo":
        moved = math.exp(pi) - math.exp(mu)
        masked = (a > 0 and moved > delta) or (a < 0 and moved < -delta)
        first = 0.0 if masked else -rho * a
        return first + kappa * (pi - mu) ** 2, first + 2 * kappa * (pi - mu), masked
    raise KeyError(name)


def step(name, tokens, *, decay=1.0, n=None, **constants):
    """Loss, gradient and metrics of one optimizer step; tokens: dicts with pi, prox, mu, a, s, sequence, version."""
    n = len(tokens) if n is None else n
    terms = [token(name, **{key: t[key] for key in ("pi", "prox", "mu", "a")}, **constants) for t in tokens]
    weights = [decay ** t["s"] for t in tokens]
    loss = sum(w * term[0] for w, term in zip(weights, terms, strict=True)) / max(n, 1)
    gradient = np.array([w * term[1] / max(n, 1) for w, term in zip(weights, terms, strict=True)])
    return loss, gradient, measure(tokens, [term[2] for term in terms])


def measure(tokens, cut):
    """The metrics of OBJECTIVE from plain lists (mismatch and KL of pi against mu)."""
    k3 = [math.exp(t["pi"] - t["mu"]) - 1 - (t["pi"] - t["mu"]) for t in tokens]
    ratios = [math.exp(t["pi"] - t["mu"]) for t in tokens]
    ages = sorted(t["s"] for t in tokens)
    names = sorted({t["sequence"] for t in tokens})
    versions = {name: {t["version"] for t in tokens if t["sequence"] == name} for name in names}
    log_weights = [sum(t["pi"] - t["mu"] for t in tokens if t["sequence"] == name) for name in names]
    top = max(log_weights, default=0.0)
    w = [math.exp(x - top) for x in log_weights]

    def mean(values):
        return sum(values) / len(values) if values else None

    return {
        "tokens": len(tokens),
        "sequences": len(names),
        "ratio_mean": mean(ratios),
        "ratio_max": max(ratios, default=None),
        "clip_fraction_positive": mean([float(c) for c, t in zip(cut, tokens, strict=True) if t["a"] > 0]),
        "clip_fraction_negative": mean([float(c) for c, t in zip(cut, tokens, strict=True) if t["a"] < 0]),
        "mismatch_kl": mean(
            [k for k, t in zip(k3, tokens, strict=True) if t["s"] == 0 and len(versions[t["sequence"]]) == 1]
        ),
        "kl_by_staleness": {
            str(s): mean([k for k, t in zip(k3, tokens, strict=True) if t["s"] == s]) for s in sorted(set(ages))
        },
        "staleness_mean": mean(ages),
        "staleness_max": max(ages, default=None),
        "staleness_p95": ages[math.ceil(0.95 * len(ages)) - 1] if ages else None,
        "ess_ratio": sum(w) ** 2 / sum(x * x for x in w) / len(names) if names else None,
    }
