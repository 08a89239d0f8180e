"""DQN on images: real Pong from EnvPool through the preset, from frames to gradient steps."""

import math

import pytest
import torch

from canter.cli.options import parse_train
from canter.envs.wrap import env_options, make_env
from canter.modules.conv2d import Conv2dModel
from canter.presets import load_preset
from canter.runners import OffPolicyRunner

pytest.importorskip("envpool")
TASK = "envpool/Pong-v5"


def test_dqn_learns_from_frames_of_pong():
    preset = load_preset(TASK, "dqn")
    small = {
        "learning_starts": 160,
        "buffer_size": 800,
        "batch_size": 8,
        "gradient_steps": 1,
        "network_hidden_dims": [8],
    }
    cfg = {**preset, "algorithm": {**preset["algorithm"], **small}, "seed": 1, "device": "cpu", "log_interval": 80}
    env = make_env(TASK, "cpu", 4, 1, **env_options(cfg.pop("run")))
    assert env.env.config["reward_clip"]
    assert env.env.config["episodic_life"]
    runner = OffPolicyRunner(env, cfg, show_progress=False)
    network = runner.alg.q_network
    before = [p.clone() for p in network.parameters()]
    seen = []
    convolutions = next(module for module in network.modules() if isinstance(module, Conv2dModel))
    hook = convolutions.register_forward_pre_hook(lambda _, given: seen.append(given[0].detach()))
    network(env.get_observations()[0])
    hook.remove()
    (frames,) = seen
    assert frames.shape == (4, 4, 84, 84)
    assert frames.dtype == torch.float32
    assert 0.3 < frames.max() <= 1.0

    history = runner.learn(total_timesteps=320).history
    stored = runner.alg.replay.data["observations"]
    assert stored.dtype == torch.uint8
    assert stored.shape[1:] == (4, 84, 84)
    assert len(runner.alg.replay) == 320
    assert stored[4 * 40].float().std() > 1.0  # a picture
    assert all(math.isfinite(row["train/q_loss"]) for row in history if "train/q_loss" in row)
    assert runner.alg.num_updates == 41  # one per vector step from the 40th on
    assert all(not torch.equal(a, b) for a, b in zip(before, network.parameters(), strict=True))
    batch = runner.alg.replay.draw(64, 1, 0.99, torch.Generator().manual_seed(0))
    assert torch.equal(batch.next_obs[:, :-1], batch.obs[:, 1:])  # the newest frame comes last


def test_the_command_line_uses_the_preset_of_pong():
    options, config = parse_train([TASK, "--algo", "dqn"])
    assert config["algorithm"]["dueling"] is True
    assert options.total_timesteps == 1_000_000
    assert options.environment.env_kwargs == {"reward_clip": True, "episodic_life": True}
