import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector.utils import create_empty_array

from canter.envs.gymnasium import (
    ActionCast,
    GymVecEnv,
    GymVecEnvContinuous,
    batch_to_rows,
    put_row,
    stored_space,
)


def zeros(env):
    return torch.zeros(env.num_envs, dtype=torch.long)


def test_thunks_are_stepped_together_and_reset_themselves():
    env = GymVecEnv([lambda: gymnasium.make("CartPole-v1")] * 4, device="cpu", seed=0)
    env.reset()
    generator = torch.Generator().manual_seed(0)
    num_ends = 0
    for _ in range(600):
        record = env.step(torch.randint(2, (4,), generator=generator))
        assert record.obs.shape == (4, 4)
        assert record.reward.shape == record.done.shape == (4,)
        assert (record.final_obs is None) == (not record.done.any())
        if record.done.any():
            num_ends += int(record.done.sum())
            # A reset observation lies within 0.05; a fallen pole does not.
            assert record.obs[record.done].abs().max() <= 0.05
            assert (record.final_obs[record.done].abs().max(1).values > 0.05).all()
    assert num_ends > 40
    assert env.max_episode_length == 500


def test_episode_ends_are_those_of_the_environments(staggered):
    env = GymVecEnv(staggered)
    env.reset()
    seen = [env.step(zeros(env)) for _ in range(6)]
    assert [r.terminated.tolist() for r in seen[:3]] == [[False] * 3, [True, False, False], [False, True, False]]
    assert seen[3].truncated.tolist() == [True, False, False]
    assert seen[1].final_obs[0].tolist() == [0, 0, 2]
    assert seen[1].obs[0].tolist() == [0, 1, 0]
    assert seen[1].obs[1].tolist() == [1, 0, 2]
    assert seen[0].final_obs is None
    assert seen[4].reward.tolist() == [1.0, 102.0, 205.0]
    assert all(r.valid.all() for r in seen)


def test_extras_hold_the_flags_and_the_final_observation(staggered):
    env = GymVecEnv(staggered)
    env.reset()
    for _ in range(4):
        record = env.step(zeros(env))
    assert record.extras["truncated"].tolist() == record.extras["time_outs"].tolist() == [True, False, False]
    assert record.extras["terminated"].tolist() == [False, False, False]
    assert record.extras["final_observation"][0].tolist() == [0, 1, 2]


def test_stored_steps_are_never_overwritten(staggered):
    env = GymVecEnv(staggered)
    first, _ = env.reset()
    records = [env.step(zeros(env)) for _ in range(5)]
    assert first[2].tolist() == [2, 0, 0]
    assert [r.obs[2].tolist() for r in records[:4]] == [[2, 0, t] for t in (1, 2, 3, 4)]
    assert [float(r.reward[2]) for r in records] == [201, 202, 203, 204, 205]
    assert records[4].terminated[2]
    assert not records[3].terminated[2]


def test_an_environment_that_reuses_its_array_is_copied(scripted):
    class Reusing(scripted):
        def _obs(self):
            self.buffer = getattr(self, "buffer", np.zeros(3, np.float32))
            self.buffer[:] = super()._obs()
            return self.buffer

    env = GymVecEnv(lambda: Reusing(0, 3))
    env.reset()
    records = [env.step(zeros(env)) for _ in range(3)]
    assert [r.obs[0, 2].item() for r in records] == [1, 2, 0]
    assert records[2].final_obs[0].tolist() == [0, 0, 3]


def test_discrete_actions_arrive_as_ints(scripted):
    env = GymVecEnv([lambda: scripted(0, 9), lambda: scripted(1, 9)])
    env.reset()
    env.step(torch.tensor([[1.0], [0.0]]))
    assert [e.actions for e in env.envs] == [[1], [0]]
    assert all(type(e.actions[0]) is int for e in env.envs)


def test_seeds_differ_by_environment_and_are_used_once(scripted):
    env = GymVecEnv([lambda: scripted(0, 2), lambda: scripted(1, 2)], seed=7)
    env.reset()
    for _ in range(2):
        env.step(zeros(env))
    env.reset()
    first, second = (e.seeds for e in env.envs)
    assert first[0] is not None
    assert first[0] != second[0]
    assert first[1:] == [None, None]


def test_the_same_seed_gives_the_same_episodes():
    def run(seed):
        env = GymVecEnv([lambda: gymnasium.make("CartPole-v1")] * 2, seed=seed)
        obs = [env.reset()[0]]
        obs += [env.step(torch.tensor([t % 2, 1])).obs for t in range(60)]
        return torch.stack(obs)

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))
    assert not torch.equal(run(1)[0, 0], run(1)[0, 1])


class Reach(gymnasium.Env):
    """Dict observations with an image, float64 and a discrete part; Box actions."""

    observation_space = spaces.Dict(
        {
            "image": spaces.Box(0, 255, (3, 4, 4), np.uint8),
            "joint": spaces.Box(-9, 9, (2,), np.float64),
            "mode": spaces.Discrete(3),
        }
    )
    action_space = spaces.Box(-0.5, 0.5, (2,))

    def reset(self, *, seed=None, options=None):
        return self._obs(0), {}

    def _obs(self, t):
        return {"image": np.full((3, 4, 4), t, np.uint8), "joint": np.full(2, t / 3), "mode": t % 3}

    def step(self, action):
        self.action = action
        return self._obs(200), 1, False, False, {}


def test_dict_observations_keep_their_parts_and_dtypes():
    env = GymVecEnv([Reach, Reach])
    env.reset()
    record = env.step(torch.tensor([[3.0, 0.1], [-3.0, 0.0]]))
    assert record.critic_obs is record.obs
    assert record.obs["image"].dtype == torch.uint8
    assert record.obs["image"][1, 2, 3, 3] == 200
    assert record.obs["joint"].dtype == torch.float32
    assert record.obs["joint"][0, 0].item() == pytest.approx(200 / 3)
    assert record.obs["mode"][0].tolist() == [0, 0, 1]
    assert env.envs[0].action.tolist() == pytest.approx([0.5, 0.1])


def test_clipping_can_be_switched_off():
    env = GymVecEnv([Reach], clip_actions=False)
    env.reset()
    env.step(torch.tensor([[3.0, 0.1]]))
    assert env.envs[0].action.tolist() == pytest.approx([3.0, 0.1])


def test_continuous_clamps_and_refuses_discrete(scripted):
    env = GymVecEnvContinuous([Reach], "cpu")
    env.reset()
    env.step(torch.tensor([[3.0, -3.0]]))
    assert env.envs[0].action.tolist() == [0.5, -0.5]
    with pytest.raises(TypeError, match=r"needs a Box action space, got Discrete\(2\)"):
        GymVecEnvContinuous([scripted])


def test_a_dict_with_group_names_feeds_actor_and_critic():
    class Asymmetric(Reach):
        observation_space = spaces.Dict({"policy": spaces.Box(-9, 9, (2,)), "critic": spaces.Box(-9, 9, (3,))})

        def _obs(self, t):
            return {"policy": np.full(2, 1.0), "critic": np.full(3, 2.0)}

    env = GymVecEnv([Asymmetric])
    obs, critic_obs = env.reset()
    assert obs.tolist() == [[1.0, 1.0]]
    assert critic_obs.tolist() == [[2.0, 2.0, 2.0]]
    assert (env.num_obs, env.num_privileged_obs) == (2, 3)


def test_an_observation_that_changes_its_shape_is_an_error(scripted):
    class Growing(scripted):
        def _obs(self):
            return np.zeros(3 if self.t < 2 else 1, np.float32)

    env = GymVecEnv([scripted, Growing])
    env.reset()
    env.step(zeros(env))
    with pytest.raises(ValueError, match=r"observation 'obs' of environment 1 has shape \(1,\), expected \(3,\)"):
        env.step(zeros(env))


@pytest.mark.parametrize("wrap", [lambda env: env, lambda env: gymnasium.wrappers.TimeLimit(env, 9)])
def test_one_environment_cannot_be_two(scripted, wrap):
    env = scripted()
    with pytest.raises(ValueError, match="environments 0 and 2 are the same Scripted; pass a function that makes a"):
        GymVecEnv([wrap(env), scripted, lambda: wrap(env)])


def test_the_longest_episode_is_that_of_a_time_limit_or_unknown(scripted):
    limited = gymnasium.wrappers.TimeLimit(scripted(), 5000)
    assert GymVecEnv(gymnasium.wrappers.NormalizeReward(limited)).max_episode_length == 5000
    assert GymVecEnv(scripted()).max_episode_length is None


def test_numbers_with_a_point_are_no_bytes():
    class Faint(gymnasium.Env):
        observation_space, action_space = spaces.Box(0, 255, (2, 2), np.uint8), spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return np.full((2, 2), 0.5), {}

    with pytest.raises(TypeError, match="'obs' of environment 0 is float64, its space is uint8; return uint8, or give"):
        GymVecEnv(Faint()).reset()


def test_environments_must_have_the_same_spaces(scripted):
    with pytest.raises(ValueError, match="environment 1 has other spaces than environment 0"):
        GymVecEnv([scripted, Reach])
    with pytest.raises(ValueError, match="empty list"):
        GymVecEnv([])


def test_errors_of_the_environment_come_through(scripted):
    class Broken(scripted):
        def step(self, action):
            raise OSError("motor on fire")

    env = GymVecEnv([Broken])
    env.reset()
    with pytest.raises(OSError, match="motor on fire"):
        env.step(zeros(env))


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ((np.zeros(3), 1.0, False, {}), r"step\(\) of environment 1 must return \(obs, .* got 4 values"),
        (None, r"step\(\) of environment 1 must return .* got NoneType None"),
        ((np.zeros(3), np.ones(1), False, False, {}), r"the reward of environment 1 must be a number, got ndarray"),
        ((np.zeros(3), [1.0], False, False, {}), r"the reward of environment 1 must be a number, got list \[1.0\]"),
        ((np.zeros(3), None, False, False, {}), r"the reward of environment 1 must be a number, got NoneType None"),
        ((np.zeros(3), "1", False, False, {}), r"the reward of environment 1 must be a number, got str '1'"),
    ],
)
def test_a_step_that_is_not_gymnasiums_is_refused_with_what_it_must_return(scripted, result, message):
    class Old(scripted):
        def step(self, action):
            return result

    env = GymVecEnv([scripted, Old])
    env.reset()
    with pytest.raises(TypeError, match=message):
        env.step(zeros(env))


def test_a_reset_that_is_not_gymnasiums_is_refused_with_what_it_must_return(scripted):
    class Old(scripted):
        def reset(self, *, seed=None, options=None):
            return np.zeros(3, np.float32)

    with pytest.raises(TypeError, match=r"reset\(\) of environment 0 must return \(obs, info\), got ndarray"):
        GymVecEnv([Old]).reset()


def test_state_cannot_be_saved_and_says_so(staggered):
    env = GymVecEnv(staggered)
    assert env.get_state() is None
    with pytest.raises(NotImplementedError, match="GymVecEnv cannot restore its state"):
        env.set_state({})


def test_get_observations_does_not_step(staggered):
    env = GymVecEnv(staggered)
    assert env.get_observations()[0].tolist() == [[0, 0, 0], [1, 0, 0], [2, 0, 0]]
    env.step(zeros(env))
    assert env.get_observations()[0].tolist() == [[0, 0, 1], [1, 0, 1], [2, 0, 1]]
    assert env.get_observations()[0].tolist() == [[0, 0, 1], [1, 0, 1], [2, 0, 1]]


def test_terminated_and_truncated_together_are_terminated(scripted):
    class Both(scripted):
        def step(self, action):
            obs, reward, *_ = super().step(action)
            return obs, reward, True, True, {}

    env = GymVecEnv([Both])
    env.reset()
    record = env.step(zeros(env))
    assert record.terminated.tolist() == [True]
    assert record.truncated.tolist() == [False]


def test_an_observation_without_a_dimension_is_refused():
    with pytest.raises(TypeError, match=r"is a single number; give it the shape \(1,\)"):
        stored_space(spaces.Dict(angle=spaces.Box(-1, 1, (), np.float32)))


def test_stored_spaces_hold_two_dtypes():
    space = spaces.Dict(
        {
            "wide": spaces.Box(-1, 1, (2,), np.float64),
            "image": spaces.Box(0, 255, (3, 8, 8), np.uint8),
            "mode": spaces.Discrete(3),
            "flags": spaces.MultiBinary(4),
        }
    )
    kept = stored_space(space)
    assert {name: (part.shape, part.dtype) for name, part in kept.items()} == {
        "wide": ((2,), np.float32),
        "image": ((3, 8, 8), np.uint8),
        "mode": ((3,), np.float32),
        "flags": ((4,), np.float32),
    }


def test_names_keep_their_order():
    box = spaces.Box(-1, 1, (2,))
    assert list(stored_space(spaces.Dict([("z", box), ("a", box)]))) == ["z", "a"]


def test_discrete_observations_become_one_hot():
    space = spaces.Discrete(3, start=5)
    rows = create_empty_array(stored_space(space), 2)
    put_row(rows, 1, np.int64(6), space)
    assert rows.tolist() == [[0, 0, 0], [0, 1, 0]]
    assert batch_to_rows(np.array([5, 7]), space, 2).tolist() == [[1, 0, 0], [0, 0, 1]]


def test_tuple_observations_follow_each_other():
    space = spaces.Tuple((spaces.Discrete(2), spaces.Box(-9, 9, (2,))))
    batch = (np.array([1, 0]), np.array([[3.0, 4.0], [5.0, 6.0]], np.float32))
    assert batch_to_rows(batch, space, 2).tolist() == [[0, 1, 3, 4], [1, 0, 5, 6]]


def test_a_row_of_another_shape_is_refused_by_name():
    space = spaces.Dict({"arm": spaces.Box(-1, 1, (4,))})
    rows = create_empty_array(stored_space(space), 2)
    with pytest.raises(ValueError, match=r"observation 'arm' of environment 1 has shape \(1,\), expected \(4,\)"):
        put_row(rows, 1, {"arm": np.zeros(1)}, space)
    with pytest.raises(ValueError, match=r"has \['leg'\], expected \['arm'\]"):
        put_row(rows, 1, {"leg": np.zeros(4)}, space)


def test_a_batch_is_copied():
    batch = np.zeros((2, 3), np.float32)
    rows = batch_to_rows(batch, spaces.Box(-1, 1, (3,)), 2)
    batch[:] = 7
    assert rows.tolist() == [[0, 0, 0], [0, 0, 0]]


def test_actions_are_clipped_and_cast():
    space = spaces.Box(np.array([-1, -np.inf]), np.array([2, 0.5]), dtype=np.float64)
    actions = torch.tensor([[-3.0, -9.0], [5.0, 0.25]])
    out = ActionCast(space, 2)(actions)
    assert out.tolist() == [[-1.0, -9.0], [2.0, 0.25]]
    assert out.dtype == np.float64
    assert ActionCast(space, 2, clip=False)(actions).tolist() == actions.tolist()
    assert actions[0, 0] == -3.0


def test_actions_of_an_integer_box_are_clipped_before_they_are_rounded():
    actions = torch.tensor([[-1.0, 2.6], [300.0, 0.4]])
    out = ActionCast(spaces.Box(0, 10, (2,), np.uint8), 2)(actions)
    assert out.tolist() == [[0, 3], [10, 0]]
    assert out.dtype == np.uint8


def test_discrete_actions_are_shifted_to_their_start():
    assert ActionCast(spaces.Discrete(3, start=-1), 3)(torch.tensor([[0.0], [1.0], [2.0]])).tolist() == [-1, 0, 1]
    many = ActionCast(spaces.MultiDiscrete([2, 3], start=[10, 20]), 2)(torch.tensor([[0, 1], [1, 2]]))
    assert many.tolist() == [[10, 21], [11, 22]]
    assert many.dtype == np.int64


def test_actions_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"actions have shape \(4, 10\); the environment wants \(4, 12\)"):
        ActionCast(spaces.Box(-1, 1, (12,)), 4)(torch.zeros(4, 10))
    with pytest.raises(ValueError, match="actions have shape"):
        ActionCast(spaces.Box(-1, 1, (2,)), 4)(torch.zeros(2, 4))


def test_action_spaces_without_a_distribution_are_refused():
    with pytest.raises(TypeError, match="actions must be Box, Discrete, MultiDiscrete or MultiBinary, not Text"):
        ActionCast(spaces.Text(3), 1)
    crossed = spaces.Box(-1, 1, (2,))
    crossed.low = crossed.high + 1
    with pytest.raises(ValueError, match="lower bound above its upper bound"):
        ActionCast(crossed, 1)


def test_every_environment_gets_its_own_seed(scripted):
    def spawn_seeds(seed, num_envs):
        env = GymVecEnv([scripted] * num_envs, seed=seed)
        env.reset()
        return [part.seeds[0] for part in env.envs]

    seeds = spawn_seeds(3, 100)
    assert len(set(seeds)) == 100
    assert seeds == spawn_seeds(3, 100)
    assert seeds[:50] == spawn_seeds(3, 50)
    assert seeds != spawn_seeds(4, 100)
