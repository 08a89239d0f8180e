"""Image encoders: flat vectors, bare images and dicts are the same thing; bytes stay bytes until then."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from canter.envs.vec_env import StepRecord, VecEnv
from canter.envs.wrap import wrap_env
from canter.modules.normalizer import EmpiricalNormalization
from canter.modules.visual_actor_critic import (
    VisualActorCritic,
    VisualActorCriticRecurrent,
    VisualDeterministicRecurrent,
)
from canter.runners import OnPolicyRunner
from canter.utils.obs_layout import UnknownSegmentError

SEGMENTS = {"proprioception": (4,), "forward_depth": (1, 8, 10), "command": (2,)}
KWARGS = {"channels": [3], "kernel_sizes": [3], "strides": [2], "hidden_sizes": [6]}


def make(cls=VisualActorCritic, **settings):
    torch.manual_seed(0)
    defaults = {"obs_segments": SEGMENTS, "visual_kwargs": KWARGS, "visual_latent_size": 5, "actor_hidden_dims": [8]}
    if cls.is_recurrent:
        defaults["rnn_hidden_size"] = 6
    return cls(86, 86, 3, **defaults | settings)


def test_orthogonal_weights_reach_the_encoder():
    """Its features are then as large as its image, which the default of torch makes a tenth of."""
    policy = make(orthogonal_init=True)
    for layer in (policy.visual_encoder.conv.conv[0], policy.visual_encoder.head.model[0]):
        rows = layer.weight.detach().flatten(1)
        torch.testing.assert_close(rows @ rows.T, 2.0 * torch.eye(len(rows)), atol=1e-5, rtol=0)
        assert not layer.bias.any()
    assert make().visual_encoder.conv.conv[0].bias.any()


def test_features_stand_where_the_image_stood():
    policy = make()
    obs = torch.randn(3, 86)
    latent = policy.visual_encoder(obs[:, 4:84].view(3, 1, 8, 10))
    by_hand = torch.cat([obs[:, :4], latent, obs[:, 84:]], 1)
    assert torch.equal(policy.embed_visual_latent(obs), by_hand)
    assert torch.equal(policy.infer(obs)[0], policy.actor(by_hand))
    assert policy.actor[0].in_features == 4 + 5 + 2
    assert torch.equal(policy.evaluate(obs), policy.critic(obs))  # the critic's is left alone


def test_the_critic_may_see_the_same_features():
    policy = make(visual_critic=True)
    obs = torch.randn(3, 86)
    assert torch.equal(policy.evaluate(obs), policy.critic(policy.embed_visual_latent(obs)))
    assert sum(name.startswith("visual_encoder") for name in policy.state_dict()) == 6


@pytest.mark.parametrize("cls", [VisualActorCritic, VisualDeterministicRecurrent])
def test_acting_on_features_skips_the_encoder(cls):
    policy, calls = make(cls), []
    policy.visual_encoder.register_forward_hook(lambda *args: calls.append(1))
    obs = 3 * torch.randn(3, 86) + 1
    policy.obs_normalizer = EmpiricalNormalization(86)
    policy.obs_normalizer.update(obs)
    features = policy.embed_visual_latent(obs)
    assert len(calls) == 1
    torch.manual_seed(1)
    on_features = policy.act_with_embedded_latent(features)
    mean = policy.action_mean
    assert len(calls) == 1
    policy.reset()
    torch.manual_seed(1)
    assert torch.equal(policy.act(obs), on_features)
    assert torch.equal(policy.action_mean, mean)


def test_an_image_a_dict_and_a_flat_vector_are_seen_alike():
    policy = make()
    image = torch.randint(256, (2, 3, 1, 8, 10), dtype=torch.uint8)
    joints, command = torch.randn(2, 3, 4), torch.randn(2, 3, 2)
    parts = {"command": command, "proprioception": joints, "forward_depth": image}
    flat = torch.cat([joints, image.flatten(2) / 255.0, command], -1)
    assert torch.equal(policy.obs_layout.flat(parts), flat)
    assert torch.equal(policy(parts, flat).mean, policy(flat, flat).mean)
    alone = VisualActorCritic(80, 80, 3, obs_segments={"eye": (1, 8, 10)}, visual_component_name="eye")
    assert torch.equal(alone(image[0]).mean, alone(image[0].flatten(1) / 255.0).mean)
    with pytest.raises(ValueError, match=r"has the parts \['eye'\], but its segments are"):
        policy({"eye": image})


def test_wrong_settings_are_named():
    with pytest.raises(UnknownSegmentError, match="no segment 'depth'; it has"):
        make(visual_component_name="depth")
    with pytest.raises(ValueError, match=r"'command' must have a shape \(C, H, W\), got \(2,\)"):
        make(visual_component_name="command")
    with pytest.raises(ValueError, match="a 8x10 image is too small"):
        make(visual_kwargs={"channels": [3], "kernel_sizes": [9], "strides": [1]})
    other = {"proprioception": (4,), "forward_depth": (1, 10, 8), "command": (2,)}
    with pytest.raises(ValueError, match="'forward_depth' cannot be shared"):
        make(visual_critic=True, critic_obs_segments=other)


class Eyes(VecEnv):
    """A picture and two numbers, both the step's; the numbers are the reward."""

    def __init__(self, num_envs=3):
        self.num_envs, self.device, self.t = num_envs, torch.device("cpu"), 0
        parts = {"eye": spaces.Box(0, 255, (1, 6, 6), np.uint8), "joints": spaces.Box(-9.0, 9.0, (2,))}
        self.obs_space = self.critic_obs_space = spaces.Dict(parts)
        self.action_space = spaces.Box(-1.0, 1.0, (2,))

    def look(self):
        eye = torch.full((self.num_envs, 1, 6, 6), 10 * self.t + 1, dtype=torch.uint8)
        obs = {"eye": eye, "joints": torch.full((self.num_envs, 2), float(self.t))}
        return obs, obs

    def reset(self):
        self.t = 0
        return self.look()

    def get_observations(self):
        return self.look()

    def seed(self, seed):
        pass

    def step(self, actions):
        self.t += 1
        done = torch.full((self.num_envs,), self.t >= 5)
        final = self.look()
        self.t = 0 if self.t >= 5 else self.t
        flags = done, torch.zeros_like(done)
        return StepRecord(*self.look(), final[0]["joints"][:, 0], *flags, *final, ~torch.zeros_like(done), {})


@pytest.mark.parametrize("class_name", ["VisualActorCritic", "VisualActorCriticRecurrent"])
def test_pictures_are_stored_as_bytes_and_vectors_are_normalised(class_name):
    policy = {"class_name": class_name, "visual_component_name": "eye", "visual_kwargs": KWARGS, "visual_critic": True}
    cfg = {"policy": policy, "num_steps_per_env": 4, "seed": 1}
    cfg["algorithm"] = {"empirical_normalization": True, "num_mini_batches": 2}
    runner = OnPolicyRunner(Eyes(), cfg, device="cpu", show_progress=False)
    runner.learn(2)
    stored = runner.alg.rollout.observations
    assert stored["eye"].dtype == torch.uint8
    assert stored["eye"].shape == (4, 3, 1, 6, 6)
    assert stored["joints"].dtype == torch.float32
    assert runner.policy.obs_segments == {"eye": (1, 6, 6), "joints": (2,)}
    assert runner.policy.obs_normalizer.leaf("joints").count == 24
    assert runner.policy.obs_normalizer.leaf("eye") is None


def test_a_bare_picture_is_one_segment():
    policy = {"class_name": "VisualActorCriticRecurrent", "visual_component_name": "obs", "visual_kwargs": KWARGS}
    cfg = {"policy": policy | {"rnn_hidden_size": 8, "visual_critic": True}, "num_steps_per_env": 4}
    runner = OnPolicyRunner(wrap_env("canter/ImageReach", num_envs=2), cfg, device="cpu", show_progress=False)
    runner.learn(1)
    assert runner.policy.obs_segments == {"obs": (3, 24, 24)}
    assert runner.alg.rollout.observations.dtype == torch.uint8
    assert isinstance(runner.policy, VisualActorCriticRecurrent)
