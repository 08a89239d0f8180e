import numpy as np
import pytest
import torch
from gymnasium import spaces

from canter.compat.batched_envs import RslRlAdapter
from canter.envs.gymnasium import GymVecEnv
from canter.envs.records import step_record
from canter.envs.torch_envs import PointRobot
from canter.envs.wrappers import ChannelsFirst, ClipActions, FlattenObs, ToDevice, VecEnvWrapper, checked_layout


def test_a_wrapper_does_what_its_environment_does():
    plain, wrapped = PointRobot(3, seed=1), VecEnvWrapper(PointRobot(3, seed=1))
    assert torch.equal(plain.reset()[1], wrapped.reset()[1])
    action = torch.ones(3, 2)
    assert torch.equal(plain.step(action).obs, wrapped.step(action).obs)
    assert torch.equal(plain.get_observations()[0], wrapped.get_observations()[0])
    assert wrapped.obs_segments == plain.obs_segments
    assert wrapped.num_privileged_obs == 9
    assert wrapped.capturable
    assert torch.equal(wrapped.CoT, plain.CoT)
    state = wrapped.get_state()
    first = wrapped.step(action).obs
    wrapped.set_state(state)
    assert torch.equal(wrapped.step(action).obs, first)
    wrapped.seed(3)
    plain.seed(3)
    assert torch.equal(plain.reset()[0], wrapped.reset()[0])
    assert wrapped.render().shape == plain.render().shape


def test_episode_lengths_go_through_a_wrapper():
    env = PointRobot(3)
    wrapped = VecEnvWrapper(env)
    wrapped.episode_length_buf = torch.tensor([1, 2, 3])
    assert env.episode_length_buf.tolist() == [1, 2, 3]


def test_a_wrapper_copies_gives_final_obs(second):
    wrapped = VecEnvWrapper(RslRlAdapter(second()))
    assert wrapped.gives_final_obs
    for _ in range(2):
        wrapped.step(torch.zeros(3, 2))
    assert not wrapped.gives_final_obs


def test_clipping_is_refused_for_choices(scripted):
    with pytest.raises(TypeError, match=r"clip_actions=1.0 is for a Box of actions, not for Discrete\(2\)"):
        ClipActions(GymVecEnv([scripted]), 1.0)


class Parts:
    """A dict environment of the batched kind."""

    def groups(self, obs, critic):
        return {"right": obs, "left": {"b": critic, "a": obs[:, :1]}}


def test_dicts_become_vectors_with_segments(third):
    class Env(Parts, third):
        pass

    env = FlattenObs(RslRlAdapter(Env()))
    assert env.obs_space.shape == (7,)
    assert list(env.obs_segments.items()) == [("right", (4,)), ("left.b", (2,)), ("left.a", (1,))]
    assert env.critic_obs_segments == env.obs_segments
    obs, critic_obs = env.reset()
    assert critic_obs is obs
    env.step(torch.zeros(3, 2))
    record = env.step(torch.zeros(3, 2))
    assert record.obs[1].tolist() == [102] * 4 + [-102] * 2 + [102]
    assert record.final_obs[0].tolist() == [2] * 4 + [-2] * 2 + [2]
    assert record.obs[0].tolist() == [0] * 7
    assert record.critic_obs is record.obs
    again = step_record(record.obs, record.critic_obs, record.reward, record.done, record.extras)
    assert torch.equal(again.final_obs, record.final_obs)
    assert torch.equal(env.get_observations()[0], record.obs)


def test_actor_and_critic_are_flattened_apart(third):
    class Env(third):
        def groups(self, obs, critic):
            return {"obs": {"x": obs}, "privileged_obs": {"x": obs, "y": critic}}

    env = FlattenObs(RslRlAdapter(Env()))
    assert (env.num_obs, env.num_privileged_obs) == (4, 6)
    assert env.critic_obs_segments == {"x": (4,), "y": (2,)}
    env.step(torch.zeros(3, 2))
    record = env.step(torch.zeros(3, 2))
    assert record.critic_obs.shape == (3, 6)
    assert record.final_critic_obs[0].tolist() == [2] * 4 + [-2] * 2


def test_leaves_keep_the_order_of_the_space_whatever_the_dict_says():
    class Swapping(PointRobot):
        def __init__(self):
            super().__init__(2, seed=0)
            box = spaces.Box(-9, 9, (2,))
            self.obs_space = self.critic_obs_space = spaces.Dict([("z", box), ("a", box)])

        def observe(self, state):
            flip = state["position"].new_ones(2, 2)
            return {"a": flip, "z": 2 * flip} if self.swapped else {"z": 2 * flip, "a": flip}

        swapped = False

    env = FlattenObs(Swapping())
    assert list(env.obs_segments) == ["z", "a"]
    assert env.get_observations()[0][0].tolist() == [2, 2, 1, 1]
    env.env.swapped = True
    assert env.get_observations()[0][0].tolist() == [2, 2, 1, 1]


def test_a_vector_stays_as_it_is():
    env = FlattenObs(PointRobot(2, seed=0))
    assert env.obs_segments == PointRobot.obs_segments
    assert env.step(torch.zeros(2, 2)).obs.shape == (2, 6)


def test_images_are_not_flattened(third):
    class Env(third):
        def groups(self, obs, critic):
            return {"state": obs, "camera": torch.zeros(3, 3, 8, 8, dtype=torch.uint8)}

    with pytest.raises(
        TypeError, match=r"uint8 image 'camera' \(3, 8, 8\), which FlattenObs would turn into 192 numbers"
    ):
        FlattenObs(RslRlAdapter(Env()))


def test_images_are_transposed(scripted):
    class Camera(scripted):
        observation_space = spaces.Dict(
            {"image": spaces.Box(0, 255, (6, 5, 3), np.uint8), "state": spaces.Box(-1, 1, (2,))}
        )

        def _obs(self):
            image = np.zeros((6, 5, 3), np.uint8)
            image[4, 1, 2] = 10 + self.t
            return {"image": image, "state": np.zeros(2, np.float32)}

    env = ChannelsFirst(GymVecEnv([lambda: Camera(0, 2)]))
    assert env.obs_space["image"].shape == (3, 6, 5)
    assert env.obs_space["state"].shape == (2,)
    obs, _ = env.reset()
    assert obs["image"][0, 2, 4, 1] == 10
    action = torch.zeros(1, dtype=torch.long)
    assert env.step(action).final_obs is None
    record = env.step(action)
    assert record.final_obs["image"][0, 2, 4, 1] == 12
    assert record.obs["image"][0, 2, 4, 1] == 10
    assert record.obs["image"].dtype == torch.uint8
    assert record.obs["state"].shape == (1, 2)


def test_every_tensor_is_moved_to_the_learners_device():
    # "meta" stands for another device: a tensor left behind would show.
    env = ToDevice(PointRobot(3, seed=0), "meta")
    assert all(part.is_meta for part in env.reset())
    record = env.step(torch.ones(3, 2))
    for name in ("obs", "critic_obs", "reward", "terminated", "truncated", "final_obs", "final_critic_obs", "valid"):
        assert getattr(record, name).is_meta, name
    assert record.extras["final_observation"]["critic_obs"].is_meta
    assert record.extras["time_outs"].is_meta
    assert env.device == torch.device("meta")
    assert not env.capturable
    assert torch.equal(env.env.get_observations()[0][:, 4:], torch.ones(3, 2))


def test_segments_must_fill_the_observation():
    assert checked_layout({"a": 2, "b": (3, 2)}, 8, "obs_segments").shapes == {"a": (2,), "b": (3, 2)}
    with pytest.raises(ValueError, match=r"obs_segments add up to 8 values \(a 2, b 6\), but the observation has 9"):
        checked_layout({"a": 2, "b": (3, 2)}, 9, "obs_segments")
