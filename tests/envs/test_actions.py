"""MultiBinary, Tuple and Dict actions."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

from canter.envs import FlatActions, GymVecEnv, wrap_env
from canter.runners import OnPolicyRunner


class Echo(gymnasium.Env):
    """Records its actions; the reward is the number of ones in them, or 1 for a nested action that the space has."""

    def __init__(self, action_space):
        self.observation_space, self.action_space = spaces.Box(-1.0, 1.0, (2,)), action_space
        self.seen, self.age = [], 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.age = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.seen.append(action)
        self.age += 1
        reward = float(np.sum(action)) if isinstance(action, np.ndarray) else 1.0
        return np.zeros(2, np.float32), reward, False, self.age == 8, {}


NESTED = spaces.Tuple((spaces.Discrete(3, start=5), spaces.MultiBinary(2), spaces.MultiDiscrete([4, 2], start=[1, 0])))


@pytest.mark.parametrize("shape", [3, (3, 1)])
@pytest.mark.parametrize("wrap", [GymVecEnv, lambda envs: wrap_env(SyncVectorEnv([lambda: env for env in envs]))])
def test_multi_binary_actions_are_independent_choices_of_two(shape, wrap):
    single = Echo(spaces.MultiBinary(shape))
    env = wrap([single])
    assert env.action_space == spaces.MultiDiscrete([2, 2, 2])
    assert env.num_actions == 6  # logits
    env.reset()
    record = env.step(torch.tensor([[1, 0, 1]]))
    assert single.seen[0].dtype == np.int8
    assert single.seen[0].ravel().tolist() == [1, 0, 1]
    assert record.reward.tolist() == [2.0]


def test_ppo_learns_multi_binary_actions():
    cfg = {"num_steps_per_env": 16, "seed": 1, "algorithm": {"learning_rate": 0.02, "num_learning_epochs": 4}}
    cfg["algorithm"] |= {"num_mini_batches": 1, "schedule": "fixed", "gamma": 0.5}
    cfg["policy"] = {"actor_hidden_dims": [8], "critic_hidden_dims": [8]}
    envs = GymVecEnv([Echo(spaces.MultiBinary(4)) for _ in range(4)])
    runner = OnPolicyRunner(envs, cfg, device="cpu", show_progress=False)
    history = runner.learn(25).history
    assert history[0]["rollout/mean_reward"] < 3.0  # of four ones
    assert history[-1]["rollout/mean_reward"] > 3.5


def test_tuple_actions_are_flattened_and_given_back_in_their_form():
    env = GymVecEnv([Echo(NESTED)])
    assert env.action_space == spaces.MultiDiscrete([3, 2, 2, 4, 2])
    env.reset()
    env.step(torch.tensor([[2, 0, 1, 3, 1]]))
    number, binary, several = env.envs[0].unwrapped.seen[0]
    assert (number, binary.tolist(), several.tolist()) == (7, [0, 1], [4, 1])
    assert (type(number), binary.dtype) == (int, np.int8)


def test_dict_actions_of_boxes_are_one_box():
    parts = {"leg": spaces.Box(-1.0, 2.0, (2,)), "arm": spaces.Box(0.0, 1.0, (1, 2), np.float64)}
    env = GymVecEnv([Echo(spaces.Dict(parts))])
    names = list(env.envs[0].unwrapped.action_space.spaces)
    flat = {"arm": [0.25, 5.0], "leg": [-3.0, 1.5]}
    env.reset()
    env.step(torch.tensor([[value for name in names for value in flat[name]]]))
    action = env.envs[0].unwrapped.seen[0]
    assert action["leg"].tolist() == [-1.0, 1.5]  # clipped to its bounds
    assert action["arm"].tolist() == [[0.25, 1.0]]
    assert action["arm"].dtype == np.float64


def test_tuple_actions_train():
    cfg = {"num_steps_per_env": 4, "algorithm": {"num_learning_epochs": 1, "num_mini_batches": 1, "schedule": "fixed"}}
    runner = OnPolicyRunner(GymVecEnv([Echo(NESTED)]), cfg, device="cpu", show_progress=False)
    assert runner.learn(1).history[0]["rollout/mean_reward"] == 1.0


def test_actions_without_a_distribution_are_refused_with_the_way_out():
    mixed = spaces.Tuple((spaces.Discrete(2), spaces.Box(-1.0, 1.0, (1,))))
    with pytest.raises(TypeError, match="not all discrete or all Boxes: .*give the environment one kind of action"):
        GymVecEnv([Echo(mixed)])
    vector = SyncVectorEnv([lambda: Echo(NESTED)])
    with pytest.raises(TypeError, match=r"not Tuple.*; canter.envs.FlatActions flattens"):
        wrap_env(vector)
    flat = wrap_env(SyncVectorEnv([lambda: FlatActions(Echo(NESTED))]))
    assert flat.action_space == spaces.MultiDiscrete([3, 2, 2, 4, 2])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_actions_of_any_precision_are_taken(dtype):
    single = Echo(spaces.Box(-1.0, 1.0, (2,)))
    env = GymVecEnv([single])
    env.step(torch.tensor([[0.5, -4.0]], dtype=dtype))
    assert single.seen[0].tolist() == [0.5, -1.0]
