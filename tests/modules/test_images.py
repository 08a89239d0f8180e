"""Images of an observation get convolutions, in whatever order their axes are."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from canter.modules import EncoderActorCritic, VisualActorCritic
from canter.modules.conv2d import channels_first, image_shape
from canter.runners import OffPolicyRunner, OnPolicyRunner


class Camera(gymnasium.Env):
    """Gives random observations of any space."""

    def __init__(self, space, action_space=None):
        self.observation_space, self.action_space = space, action_space or spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 1.0, bool(self.np_random.random() < 0.2), False, {}


def image(*shape, dtype=np.uint8):
    return spaces.Box(0, 255 if dtype == np.uint8 else 1, shape, dtype)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((3, 96, 128), (3, 96, 128)),
        ((96, 128, 3), (3, 96, 128)),
        ((84, 84, 12), (12, 84, 84)),
        ((32, 16, 16), (32, 16, 16)),  # a map of 32 features
        ((4, 84, 84, 1), (4, 84, 84)),
        ((4, 96, 96, 3), (12, 96, 96)),
        ((4, 3, 96, 96), (12, 96, 96)),
        ((4, 84, 84), (4, 84, 84)),
        ((2, 3, 4), None),
        ((6, 40), None),
    ],
)
def test_the_channels_are_the_odd_side_out_and_frames_are_channels(shape, expected):
    assert image_shape(shape) == expected


def test_stacked_pixels_keep_their_place():
    stack = torch.arange(2 * 8 * 9 * 3).view(2, 8, 9, 3)
    assert torch.equal(channels_first(stack, (2, 8, 9, 3))[4], stack[1, :, :, 1])


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize("shape", [(8, 10, 3), (3, 36, 40), (2, 8, 10, 1)])
@pytest.mark.parametrize("settings", [{}, {"policy": {"class_name": "VisualActorCritic"}}])
def test_ppo_sees_one_image_through_convolutions_without_being_told(dtype, shape, settings):
    settings = {"num_steps_per_env": 4, "seed": 1, "algorithm": {"num_mini_batches": 2}, **settings}
    runner = OnPolicyRunner(Camera(image(*shape, dtype=dtype)), settings, device="cpu", show_progress=False)
    assert isinstance(runner.alg.policy, VisualActorCritic)
    encoder = runner.alg.policy.visual_encoder
    before = [weight.clone() for weight in encoder.parameters()]
    runner.learn(2)
    assert all(not torch.equal(old, new) for old, new in zip(before, encoder.parameters(), strict=True))


def test_every_image_of_a_dict_gets_an_encoder_that_the_critic_shares():
    space = spaces.Dict({"left": image(8, 8, 3), "right": image(3, 12, 8), "speed": spaces.Box(-1, 1, (4,))})
    settings = {"num_steps_per_env": 4, "seed": 1, "algorithm": {"num_mini_batches": 2}}
    runner = OnPolicyRunner(Camera(space), settings, device="cpu", show_progress=False)
    policy = runner.alg.policy
    assert isinstance(policy, EncoderActorCritic)
    assert policy.encoder_component_names == ("left", "right")
    assert policy.actor[0].in_features == policy.critic[0].in_features == 2 * 512 + 4
    runner.learn(1)


@pytest.mark.parametrize(("algorithm", "actions"), [("dqn", None), ("sac", spaces.Box(-1, 1, (2,)))])
def test_off_policy_networks_take_small_and_stacked_images_too(algorithm, actions):
    settings = {"algorithm": {"class_name": algorithm, "learning_starts": 8, "batch_size": 8}, "seed": 1}
    env = Camera(image(2, 8, 10, 1), actions)
    runner = OffPolicyRunner(env, settings, device="cpu", show_progress=False)
    runner.learn(total_timesteps=12)
    assert any(isinstance(layer, torch.nn.Conv2d) for layer in runner.alg.policy.modules())
