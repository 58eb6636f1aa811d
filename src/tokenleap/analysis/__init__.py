"""The theory of speculative decoding: the speed-up that a draft length should bring.

`formulas` has pure functions of three numbers (the acceptance rate alpha, the draft length gamma
and the cost ratio c), and others of the distributions p and q themselves. Their theorems and
equations are those of Leviathan et al., "Fast Inference from Transformers via Speculative Decoding"
(2023), unless they name another paper. `measure` and `compare` take the numbers from a real model
and compare predicted with measured speed-ups. They load PyTorch, so they are not imported here.
`tokenleap plan` uses all of them; `tokenleap.tuning` uses some.
"""

from tokenleap.analysis.formulas import (
    MAX_GAMMA,
    acceptance_probability,
    acceptance_rate,
    accepted_distribution,
    best_gamma,
    best_gamma_on_curve,
    expected_tokens,
    guaranteed_improvement,
    improvement,
    improvement_on_curve,
    lenient_acceptance_probability,
    lk_divergence,
    memory_reduction,
    operations,
    oracle_improvement,
    pays,
    rejection_sampling_probability,
    specdec_latency,
)

__all__ = [
    "MAX_GAMMA",
    "acceptance_probability",
    "acceptance_rate",
    "accepted_distribution",
    "best_gamma",
    "best_gamma_on_curve",
    "expected_tokens",
    "guaranteed_improvement",
    "improvement",
    "improvement_on_curve",
    "lenient_acceptance_probability",
    "lk_divergence",
    "memory_reduction",
    "operations",
    "oracle_improvement",
    "pays",
    "rejection_sampling_probability",
    "specdec_latency",
]
