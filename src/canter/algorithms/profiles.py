"""Profiles: settings of SAC and TD3 by the number of environments; docs/off-policy.md gives the reasons."""

from __future__ import annotations

from typing import Any

# Thousands of environments on a GPU. Sources: FastTD3 (Seo et al. 2025), FastSAC (holosoma's published defaults).
MASSIVE: dict[str, Any] = {
    "gamma": 0.97, "tau": 0.125, "batch_size": 8192, "buffer_steps_per_env": 1024, "learning_starts": 0,
    "gradient_steps": 8, "policy_delay": 4, "num_atoms": 101, "v_min": -20.0, "v_max": 20.0, "normalize_rewards": True,
    "critic_reduction": "mean", "activation": "silu", "layer_norm": True, "actor_hidden_dims": (512, 256, 128),
    "critic_hidden_dims": (768, 384, 192), "optimizer_class_name": "AdamW", "weight_decay": 1e-3, "max_grad_norm": None,
    "empirical_normalization": True, "precision": "bf16",
}  # fmt: skip
SAC_NOISE = {"init_alpha": 1e-3, "target_entropy": 0.0, "min_log_std": -5.0, "max_log_std": 0.0, "init_std": 0.5}
TD3_NOISE = {"exploration_noise": 0.01, "exploration_noise_max": 0.4}
PROFILES: dict[str, dict[str, dict[str, Any]]] = {
    "sac": {"classic": {}, "massive": {**MASSIVE, **SAC_NOISE}},
    "td3": {"classic": {}, "massive": {**MASSIVE, **TD3_NOISE, "policy_delay": 2}},
}


def profile_settings(algorithm: str, name: str | None) -> dict[str, Any]:
    """The settings of a profile; {} for None."""
    if name is None:
        return {}
    profiles = PROFILES.get(algorithm.lower(), {})
    if name not in profiles:
        raise ValueError(f"{algorithm} has no profile {name!r}; there are {', '.join(profiles) or 'none'}")
    return dict(profiles[name])
