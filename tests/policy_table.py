"""Every policy class and every stage that the matrix tests run through, with small settings; add a row for yours."""

from __future__ import annotations

from itertools import cycle, permutations
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces

from canter.algorithms.estimator import EstimatorPPO
from canter.algorithms.ppo import PPO
from canter.envs.torch_envs.base import TorchEnv
from canter.modules import (
    ActorCritic,
    ActorCriticMutex,
    ActorCriticRecurrent,
    AmpMixin,
    DeterministicPolicyMixin,
    EncoderActorCriticMixin,
    EstimatorMixin,
    PrivilegeEstimatorMixin,
    VisualActorCriticMixin,
)
from canter.modules.build import POLICIES

SEGMENTS = {"pos": (3,), "image": (1, 6, 6), "window": (4, 2), "vel": (2,)}
CRITIC_SEGMENTS = {"push": (2,), "vel": (2,), "image": (1, 6, 6), "window": (4, 2), "pos": (3,)}
SMALL = {"actor_hidden_dims": (8,), "critic_hidden_dims": (8,)}
MEMORIES = {"mlp": {}} | {kind: {"rnn_type": kind, "rnn_hidden_size": 6} for kind in ("lstm", "gru")}


class Stage(NamedTuple):
    """A mixin and settings with which it does something."""

    mixin: type
    settings: dict[str, Any]


ENCODERS = {
    "encoder_component_names": ("window", "pos"),
    "encoder_class_name": ("HistoryEncoder", "MlpModel"),
    "encoder_kwargs": (
        {"channels": (4,), "kernel_sizes": (3,), "strides": (1,), "hidden_sizes": (8,)},
        {"hidden_sizes": (8,)},
    ),
    "encoder_output_size": 5,
    "critic_encoder_component_names": "shared",
}
ESTIMATOR = {
    "estimator_obs_components": ("pos", "window"),
    "estimator_target_components": ("vel",),
    "estimator_kwargs": {"hidden_sizes": (8,)},
    "replace_state_prob": 0.5,
}
ADAPTOR = {
    "adaptor_obs_components": ("window", "vel"),
    "adaptor_target_components": ("push",),
    "adaptor_kwargs": {"hidden_sizes": (8,)},
    "append_adapted_state": True,
}
VISUAL = {
    "visual_component_name": "image",
    "visual_latent_size": 4,
    "visual_kwargs": {"channels": (3,), "kernel_sizes": (3,), "strides": (2,), "hidden_sizes": (8,)},
    "visual_critic": True,
}
AMP = {"amp_discriminator": {"input_dim": 4, "style_reward_coef": 1.0, "hidden_dims": (8,), "task_reward_lerp": 0.5}}
STAGES = {
    "encoder": Stage(EncoderActorCriticMixin, ENCODERS),
    "estimator": Stage(EstimatorMixin, ESTIMATOR),
    "adaptor": Stage(PrivilegeEstimatorMixin, ADAPTOR),
    "visual": Stage(VisualActorCriticMixin, VISUAL),
    "deterministic": Stage(DeterministicPolicyMixin, {}),
    "amp": Stage(AmpMixin, AMP),
}


class Case(NamedTuple):
    """A policy class, its settings, and its kind of memory."""

    name: str
    cls: type
    settings: dict[str, Any]
    memory: str

    @property
    def id(self) -> str:
        return f"{self.name}-{self.memory}"


def settings_of(cls: type) -> dict[str, Any]:
    """Settings for every stage in a class."""
    found = dict(SMALL)
    for mixin, settings in STAGES.values():
        if issubclass(cls, mixin):
            found |= settings
    return found


def cases_of(name: str, cls: type) -> list[Case]:
    kinds = ("lstm", "gru") if issubclass(cls, ActorCriticRecurrent) else ("mlp",)
    return [Case(name, cls, settings_of(cls) | MEMORIES[kind], kind) for kind in kinds]


# RslRlModels is made of another library's classes; tests/compat/test_models.py has a stand-in for them.
# A mutex policy has no networks, but those of runs.
OURS = {
    name: cls
    for name, cls in POLICIES.items()
    if issubclass(cls, ActorCritic) and name != "RslRlModels" and not issubclass(cls, ActorCriticMutex)
}
PRESETS = [case for name, cls in OURS.items() for case in cases_of(name, cls)]
# The estimator's third way of being built.
OTHER = {"use_actor_rnn": True, "replace_state_prob": 0.0}
PRESETS += [
    case._replace(name="StateAcRecurrent(use_actor_rnn)", settings=case.settings | OTHER)
    for case in PRESETS
    if case.name == "StateAcRecurrent"
]
PAIRS = [
    cases_of(f"{outer}+{inner}", type(f"{outer}_{inner}", (STAGES[outer].mixin, STAGES[inner].mixin, base), {}))[-1]
    for (outer, inner), base in zip(permutations(STAGES, 2), cycle((ActorCritic, ActorCriticRecurrent)), strict=False)
]


class KitEnv(TorchEnv):
    """A point that is pushed about; a picture, a window and hidden velocities make all segments depend on its state."""

    obs_segments, critic_obs_segments = SEGMENTS, CRITIC_SEGMENTS

    def __init__(self, num_envs=3, device="cpu", seed=0, max_episode_length=4):
        self.obs_space = spaces.Box(-np.inf, np.inf, (49,))
        self.critic_obs_space = spaces.Box(-np.inf, np.inf, (51,))
        self.action_space = spaces.Box(-1.0, 1.0, (2,))
        self._grid = torch.linspace(-1, 1, 6, device=device)
        super().__init__(num_envs, device, seed, max_episode_length)

    def initial_state(self, n):
        return {"pos": self.uniform(n, 3, -1, 1), "vel": self.uniform(n, 2, -1, 1), "push": self.uniform(n, 2, -1, 1)}

    def dynamics(self, state, action):
        vel = 0.8 * state["vel"] + 0.3 * action + 0.2 * state["push"]
        pos = state["pos"] + 0.3 * torch.cat([vel, vel.sum(1, keepdim=True)], 1)
        return {"pos": pos, "vel": vel, "push": state["push"]}, -pos.square().sum(1), pos.abs().amax(1) > 1.6

    def observe(self, state):
        pos = state["pos"]
        image = (pos[:, :1, None] * self._grid[:, None] + pos[:, 1:2, None] * self._grid).sin().flatten(1)
        window = torch.stack([(pos[:, :2] - 0.1 * k * state["vel"]) for k in range(4)], 1).flatten(1)
        obs = torch.cat([pos, image, window, state["vel"]], 1)
        return obs, torch.cat([state["push"], state["vel"], image, window, pos], 1)


def build(case: Case, seed: int = 0) -> Any:
    """The case's policy, always with the same weights."""
    torch.manual_seed(seed)
    return case.cls(49, 51, 2, obs_segments=SEGMENTS, critic_obs_segments=CRITIC_SEGMENTS, **case.settings)


def build_algorithm(case: Case, env: Any, num_steps: int = 6, **settings: Any) -> Any:
    """PPO for the case's policy, which learns to estimate if the policy estimates."""
    policy = build(case)
    algorithm = EstimatorPPO if getattr(policy, "estimates", None) else PPO
    defaults = {"seed": 3, "num_mini_batches": 2, "learning_rate": 1e-2, "execution": "eager"}
    alg = algorithm(policy, device=str(env.device), **defaults | settings)
    alg.prepare(env, num_steps)
    return alg
