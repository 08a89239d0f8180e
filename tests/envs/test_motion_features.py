"""Windows of motion: the right frames in the right order, and none that spans a reset."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from canter.envs.components import MotionFeatures, feature_columns, windows
from canter.envs.torch_envs.base import TorchEnv


class Counter(TorchEnv):
    """Observes (100 * env + steps since the start, its negative); episodes last 3 steps."""

    obs_segments = {"number": (1,), "negative": (1,)}

    def __init__(self, num_envs=2):
        self.obs_space = self.critic_obs_space = spaces.Box(-np.inf, np.inf, (2,))
        self.action_space = spaces.Box(-1.0, 1.0, (1,))
        super().__init__(num_envs, max_episode_length=3, seed=0)

    def initial_state(self, n):
        return {"t": 100.0 * torch.arange(n)}

    def dynamics(self, state, action):
        return {"t": state["t"] + 1}, torch.zeros_like(state["t"]), torch.zeros_like(state["t"], dtype=torch.bool)

    def observe(self, state):
        return torch.stack([state["t"], -state["t"]], 1)


def steps(env, count):
    env.reset()
    return [env.step(torch.zeros(2, 1)) for _ in range(count)]


@pytest.mark.parametrize("frames", [1, 2, 3])
def test_windows_hold_the_last_frames_oldest_first(frames):
    records = steps(MotionFeatures(Counter(), ["number"], frames), 2)
    seen = [record.extras["observations"]["ref_obs"][1, :, 0].tolist() for record in records]
    wanted = {1: [[101], [102]], 2: [[100, 101], [101, 102]], 3: [[100, 100, 101], [100, 101, 102]]}[frames]
    assert seen == wanted


def test_no_window_spans_a_reset():
    records = steps(MotionFeatures(Counter(), ["number"], 2), 5)
    now = [r.extras["observations"]["ref_obs"][0, :, 0].tolist() for r in records]
    final = [r.extras["final_observation"]["ref_obs"][0, :, 0].tolist() for r in records]
    assert now == [[0, 1], [1, 2], [0, 0], [0, 1], [1, 2]]
    assert final[2] == [2, 3]
    assert records[2].done.all()


def test_returned_windows_do_not_change():
    records = steps(MotionFeatures(Counter(), None, 2), 3)
    assert records[0].extras["observations"]["ref_obs"][0].tolist() == [[0, 0], [1, -1]]


def test_the_state_goes_on_exactly():
    env = MotionFeatures(Counter(), ["number"], 2)
    steps(env, 2)
    state = env.get_state()
    after = env.step(torch.zeros(2, 1)).extras["observations"]["ref_obs"]
    other = MotionFeatures(Counter(), ["number"], 2)
    other.set_state(state)
    assert torch.equal(other.step(torch.zeros(2, 1)).extras["observations"]["ref_obs"], after)


def test_columns_by_name_and_number():
    assert feature_columns(["b", 0, -1], {"a": (2,), "b": (3,)}, 5) == [2, 3, 4, 0, 4]
    assert feature_columns(None, None, 3) == [0, 1, 2]
    with pytest.raises(KeyError, match="no segment 'c'"):
        feature_columns(["c"], {"a": (2,)}, 2)
    with pytest.raises(IndexError):
        feature_columns([7], None, 3)


def test_windows_of_a_clip():  # the last frame is no window with itself
    clip = torch.arange(8.0).view(4, 2)
    assert windows(clip, 2).tolist() == [[0, 1, 2, 3], [2, 3, 4, 5], [4, 5, 6, 7]]
    with pytest.raises(ValueError, match="a clip of 4 frames has no window of 5"):
        windows(clip, 5)
    with pytest.raises(ValueError, match="frames must be a whole number of steps, at least 1, got 0"):
        MotionFeatures(Counter(), None, 0)
