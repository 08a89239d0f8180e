"""Run directories of sub-policies whose actions are known numbers."""

import json

import torch
import yaml

from canter.modules.actor_critic import ActorCritic
from canter.modules.actor_critic_recurrent import ActorCriticRecurrent
from canter.utils.checkpoint import save_checkpoint

SEGMENTS = {"proprioception": (48,), "engaging_block": (8,)}
NUM_OBS, NUM_ACTIONS = 56, 12
POLICY = {"actor_hidden_dims": [], "critic_hidden_dims": []}
RNN = {"rnn_type": "gru", "rnn_hidden_size": 4}
SCALES = {"obs_scales": {"lin_vel": 2.0, "ang_vel": 0.25}}


def constant_policy(value, cls=ActorCritic, **settings):
    """A policy whose every action is `value`, or for a recurrent one whose action is the sum of its memory plus it."""
    policy = cls(NUM_OBS, NUM_OBS, NUM_ACTIONS, **{**POLICY, **settings})
    with torch.no_grad():
        policy.actor[0].weight.fill_(1.0 if cls is ActorCriticRecurrent else 0.0)
        policy.actor[0].bias.fill_(value)
    return policy


def write_run(directory, model, action_scale=0.5, name="model_10.pt", config_name="config.json", **config):
    directory.mkdir(parents=True, exist_ok=True)
    settings = RNN if model.is_recurrent else {}
    whole = {
        "policy": {"num_actor_obs": 999, "class_name": type(model).__name__, **POLICY, **settings},
        "control": {"action_scale": action_scale},
        "normalization": SCALES,
        **config,
    }
    text = json.dumps(whole) if config_name.endswith("json") else yaml.safe_dump(whole)
    (directory / config_name).write_text(text)
    save_checkpoint(directory / name, {"model_state_dict": model.state_dict(), "iter": 10})
    return directory


def observation(blocks):
    """Observations (N, 56): number i of the proprioception is i, the obstacle's number is that of the env, or None."""
    obs = torch.zeros(len(blocks), NUM_OBS)
    obs[:, :48] = torch.arange(48.0)
    for row, block in enumerate(blocks):
        if block is not None:
            obs[row, 48 + 1 + block] = 1.0
    return obs
