"""Writes the checkpoints beside this file with the rsl_rl that is installed: 2.3.3, 3.3.0, 4.0.1 and 5.5.1 were used.

    pip install rsl-rl-lib==5.5.1 tensordict && python tests/compat/rsl_rl/make_checkpoints.py

A checkpoint is written by rsl_rl's own runner after two iterations. Its `infos` hold the training dict, three
observations and the actions and values that rsl_rl gives for them; before the third, episodes ended in `dones`.
"""

import copy
import importlib.metadata
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from peer import PeerEnv, model_cfg, policy_cfg
from rsl_rl.runners import OnPolicyRunner

VERSION = importlib.metadata.version("rsl-rl-lib")
STYLE = int(VERSION.split(".")[0])


def noise_of_4(cfg):
    """The actor's noise as rsl_rl 4.0 names it."""
    given = cfg["actor"].pop("distribution_cfg")
    cfg["actor"] |= {"stochastic": True, "init_noise_std": given["init_std"], "noise_std_type": given["std_type"]}
    cfg["critic"]["stochastic"] = False
    return cfg


CASES = {
    2: {"mlp_normalized": policy_cfg(2, normalized=True), "lstm": policy_cfg(2, "lstm")},
    3: {"mlp_normalized": policy_cfg(3, normalized=True, noise_std_type="log"), "gru": policy_cfg(3, "gru", True)},
    4: {"lstm": noise_of_4(model_cfg("lstm", (True, False)))},
    5: {
        "mlp": model_cfg(),
        "mlp_normalized": model_cfg(normalized=(True, False)),
        "gru": model_cfg("gru", (False, True)),
        "lstm_normalized": model_cfg("lstm", (True, True)),
        "state_dependent": model_cfg(distribution={"class_name": "HeteroscedasticGaussianDistribution"}),
        "beta": model_cfg(distribution={"class_name": "BetaDistribution", "action_range": [-2.0, 1.0]}),
    },
}


def values_of(runner, env):
    """rsl_rl's value of the current observations."""
    if STYLE > 3:
        return runner.alg.critic(env.groups)
    if STYLE == 3:
        return runner.alg.policy.evaluate(env.groups)
    return runner.alg.policy.evaluate(runner.privileged_obs_normalizer(env.groups["critic"]))


for case, cfg in CASES[STYLE].items():
    torch.manual_seed(1)
    env = PeerEnv(STYLE)
    runner = OnPolicyRunner(env, copy.deepcopy(cfg), log_dir=tempfile.mkdtemp(), device="cpu")
    runner.learn(2)
    act = runner.get_inference_policy("cpu")
    models = [runner.alg.actor, runner.alg.critic] if STYLE > 3 else [runner.alg.policy]
    for model in models:
        model.reset()
    dones = torch.tensor([1, 0, 0, 1])
    obs, actions, values = [], [], []
    with torch.inference_mode():
        for step in range(3):
            env.draw()
            if step == 2:
                for model in models:
                    model.reset(dones)
            obs.append(dict(env.groups.clone().items()))
            actions.append(act(env.groups if STYLE > 2 else env.get_observations()[0]).clone())
            values.append(values_of(runner, env).clone())
    infos = {"version": VERSION, "cfg": cfg, "obs": obs, "dones": dones, "actions": actions, "values": values}
    runner.save(str(Path(__file__).parent / f"rsl_rl_{STYLE}_{case}.pt"), infos)
