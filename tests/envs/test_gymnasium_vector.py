import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from no_host_sync import NoHostSync

from canter.envs.gymnasium import GymVecEnv
from canter.envs.gymnasium_vector import GymVectorEnvAdapter, autoreset_mode


def adapter(fns, mode):
    return GymVectorEnvAdapter(SyncVectorEnv(fns, autoreset_mode=mode))


def test_every_autoreset_mode_gives_the_same_transitions(staggered, transitions):
    expected = transitions(GymVecEnv(staggered), 40)
    assert [len(per_env) for per_env in expected] == [40, 40, 40]
    for mode in AutoresetMode:
        got = transitions(adapter(staggered, mode), 40)
        for per_env, wanted in zip(got, expected, strict=True):
            # NEXT_STEP spends a step on every reset, so it gets less far.
            assert len(per_env) >= 26
            assert per_env == wanted[: len(per_env)], mode
    assert sum(t[3] for t in expected[0]) == 10


def test_next_step_masks_the_step_that_only_resets(staggered):
    env = adapter(staggered, AutoresetMode.NEXT_STEP)
    assert env.has_invalid_steps
    env.reset()
    action = torch.zeros(3, dtype=torch.long)
    records = [env.step(action) for _ in range(6)]
    assert records[1].terminated.tolist() == [True, False, False]
    assert records[1].final_obs[0].tolist() == [0, 0, 2]
    assert records[1].obs[0].tolist() == [0, 0, 2]
    after = records[2]
    assert after.valid.tolist() == [False, True, True]
    assert after.reward[0] == 0
    assert not after.done[0]
    assert after.obs[0].tolist() == [0, 1, 0]
    assert after.terminated.tolist() == [False, True, False]
    assert records[3].valid.tolist() == [True, False, True]
    assert records[0].final_obs is None
    assert records[3].final_obs is None


def test_a_reset_forgets_that_episodes_ended(staggered):
    env = adapter(staggered, AutoresetMode.NEXT_STEP)
    env.reset()
    for _ in range(2):
        env.step(torch.zeros(3, dtype=torch.long))
    env.reset()
    assert env.step(torch.zeros(3, dtype=torch.long)).valid.all()


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_other_modes_have_only_valid_steps(staggered, mode):
    env = adapter(staggered, mode)
    assert not env.has_invalid_steps
    env.reset()
    records = [env.step(torch.zeros(3, dtype=torch.long)) for _ in range(6)]
    assert all(r.valid.all() for r in records)
    assert records[1].final_obs[0].tolist() == [0, 0, 2]
    assert records[1].obs[0].tolist() == [0, 1, 0]
    assert env.gives_final_obs


def test_gymnasiums_own_cartpole_agrees_with_ours_in_every_mode(transitions):
    def run(mode):
        env = gymnasium.make_vec("CartPole-v1", 3, vectorization_mode="sync", vector_kwargs={"autoreset_mode": mode})
        return transitions(GymVectorEnvAdapter(env, seed=5), 60)

    same, other = run(AutoresetMode.SAME_STEP), run(AutoresetMode.DISABLED)
    assert same == other
    late = run(AutoresetMode.NEXT_STEP)
    for i in range(3):
        assert late[i] == same[i][: len(late[i])]
        assert any(t[2] for t in late[i])


def test_dict_observations_and_their_final_ones():
    class Dicts(gymnasium.Env):
        observation_space = spaces.Dict(
            {"policy": spaces.Box(-9, 9, (1,), np.float64), "critic": spaces.Box(0, 255, (1, 2, 2), np.uint8)}
        )
        action_space = spaces.Box(-1, 1, (1,))

        def reset(self, *, seed=None, options=None):
            self.t = 0
            return self._obs(), {}

        def _obs(self):
            return {"policy": np.full(1, self.t / 3), "critic": np.full((1, 2, 2), self.t, np.uint8)}

        def step(self, action):
            self.t += 1
            return self._obs(), 0.0, False, self.t == 2, {}

    for mode in (AutoresetMode.SAME_STEP, AutoresetMode.DISABLED):
        env = adapter([Dicts, Dicts], mode)
        obs, critic_obs = env.reset()
        assert obs.dtype == torch.float32
        assert critic_obs.dtype == torch.uint8
        env.step(torch.zeros(2, 1))
        record = env.step(torch.zeros(2, 1))
        assert record.truncated.tolist() == [True, True]
        assert record.obs.tolist() == [[0.0], [0.0]]
        assert record.final_obs[:, 0].tolist() == pytest.approx([2 / 3, 2 / 3])
        assert record.final_obs.dtype == torch.float32
        assert record.final_critic_obs[0, 0, 0].tolist() == [2, 2]
        assert record.final_critic_obs.dtype == torch.uint8


def test_shared_buffers_of_worker_processes_are_copied(staggered):
    inner = AsyncVectorEnv(staggered, copy=False, autoreset_mode=AutoresetMode.SAME_STEP)
    env = GymVectorEnvAdapter(inner)
    try:
        first, _ = env.reset()
        second = env.step(torch.zeros(3, dtype=torch.long)).obs
        env.step(torch.zeros(3, dtype=torch.long))
        assert first[:, 2].tolist() == [0, 0, 0]
        assert second[:, 2].tolist() == [1, 1, 1]
    finally:
        env.close()


def test_a_step_of_worker_processes_has_two_halves(staggered):
    workers, plain = (
        GymVectorEnvAdapter(cls(staggered, autoreset_mode=AutoresetMode.NEXT_STEP), seed=1)
        for cls in (AsyncVectorEnv, SyncVectorEnv)
    )
    try:
        assert workers.overlaps
        assert not plain.overlaps
        for env in (workers, plain):
            env.reset()
        for _ in range(12):
            actions = torch.zeros(3, dtype=torch.long)
            workers.send(actions)
            ours, theirs = workers.recv(), plain.step(actions)
            for name in ("obs", "reward", "terminated", "truncated", "valid"):
                assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    finally:
        workers.close()


@pytest.mark.parametrize("answer", [np.zeros((3, 2)), np.zeros(4), 0.0])
def test_rewards_of_another_shape_are_named(staggered, answer):
    env = GymVectorEnvAdapter(SyncVectorEnv(staggered, autoreset_mode=AutoresetMode.SAME_STEP))
    env.reset()
    step = env.env.step
    env.env.step = lambda actions: (lambda obs, reward, *rest: (obs, answer, *rest))(*step(actions))
    with pytest.raises(ValueError, match=r"rewards of 3 environments must have shape \(3,\), got "):
        env.step(torch.zeros(3, dtype=torch.long))


class TensorVector(VectorEnv):
    """ManiSkill's way: tensors, resets within the step, full-batch final observations, no stated mode."""

    metadata = {}
    base_env = None
    spec = None
    num_envs = 2
    single_observation_space = spaces.Box(-np.inf, np.inf, (2,))
    single_action_space = spaces.Box(-1, 1, (2,))
    device = torch.device("cpu")
    with_final = True

    def reset(self, *, seed=None, options=None):
        self.obs = torch.zeros(2, 2)
        return self.obs, {}

    def step(self, actions):
        self.actions = actions
        self.obs += torch.arange(1.0, 3.0).unsqueeze(1)
        final = self.obs.clone()
        done = self.obs[:, 0] >= 4
        self.obs *= ~done.unsqueeze(1)
        infos = {"final_observation": final} if self.with_final else {}
        return self.obs, torch.ones(2), torch.zeros(2, dtype=torch.bool), done, infos


def test_tensor_environments_stay_tensors():
    inner = TensorVector()
    assert autoreset_mode(inner) is AutoresetMode.SAME_STEP
    env = GymVectorEnvAdapter(inner)
    obs, _ = env.reset()
    with NoHostSync():
        first = env.step(torch.full((2, 2), 5.0))
        second = env.step(torch.zeros(2, 2))
    assert obs.tolist() == [[0, 0], [0, 0]]
    assert first.obs.tolist() == [[1, 1], [2, 2]]
    assert second.truncated.tolist() == [False, True]
    assert second.final_obs[1].tolist() == [4, 4]
    assert second.obs[1].tolist() == [0, 0]
    assert inner.actions.tolist() == [[0, 0], [0, 0]]


def test_box_actions_of_tensor_environments_are_clipped():
    env = GymVectorEnvAdapter(TensorVector())
    env.reset()
    env.step(torch.tensor([[5.0, 0.5], [-5.0, 0.0]]))
    assert env.env.actions.tolist() == [[1, 0.5], [-1, 0]]


def test_a_missing_final_observation_is_noticed():
    inner = TensorVector()
    inner.with_final = False
    env = GymVectorEnvAdapter(inner)
    env.reset()
    env.step(torch.zeros(2, 2))
    assert env.gives_final_obs
    assert env.step(torch.zeros(2, 2)).final_obs is None
    assert not env.gives_final_obs


def test_seeds_are_used_once(staggered):
    inner = SyncVectorEnv(staggered)
    env = GymVectorEnvAdapter(inner, seed=3)
    env.reset()
    env.reset()
    assert [e.unwrapped.seeds for e in inner.envs] == [[3, None], [4, None], [5, None]]


def test_an_observation_of_another_shape_is_an_error(staggered):
    inner = SyncVectorEnv(staggered)
    env = GymVectorEnvAdapter(inner)
    env.reset()
    step = inner.step
    inner.step = lambda actions: (np.zeros((3, 5)), *step(actions)[1:])
    with pytest.raises(ValueError, match=r"observation 'obs' has shape \(3, 5\), expected \(3, 3\)"):
        env.step(torch.zeros(3, dtype=torch.long))


def test_discrete_final_observations_are_one_hot_too():
    class Cell(gymnasium.Env):
        observation_space = spaces.Discrete(4)
        action_space = spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            self.t = 0
            return 0, {}

        def step(self, action):
            self.t += 1
            return self.t, 1.0, self.t == 3, False, {}

    for mode in AutoresetMode:
        env = adapter([Cell, Cell], mode)
        env.reset()
        records = [env.step(torch.zeros(2, dtype=torch.long)) for _ in range(3)]
        assert records[1].obs.tolist() == [[0, 0, 1, 0]] * 2, mode
        assert records[2].final_obs.tolist() == [[0, 0, 0, 1]] * 2, mode


def test_a_bad_reward_of_a_resetting_step_is_dropped(staggered):
    inner = SyncVectorEnv(staggered)
    env = GymVectorEnvAdapter(inner)
    env.reset()
    for _ in range(2):
        env.step(torch.zeros(3, dtype=torch.long))
    step = inner.step
    inner.step = lambda actions: (lambda a: (a[0], np.array([np.nan, 1, 1]), *a[2:]))(step(actions))
    assert env.step(torch.zeros(3, dtype=torch.long)).reward.tolist() == [0, 1, 1]


def test_a_resetting_step_ends_nothing(staggered):
    inner = SyncVectorEnv(staggered)
    env = GymVectorEnvAdapter(inner)
    env.reset()
    for _ in range(2):
        env.step(torch.zeros(3, dtype=torch.long))
    step = inner.step
    stale = np.array([True, False, False])
    inner.step = lambda actions: (*step(actions)[:2], stale, stale, {})
    record = env.step(torch.zeros(3, dtype=torch.long))
    assert record.valid.tolist() == [False, True, True]
    assert not record.done.any()
    assert env.step(torch.zeros(3, dtype=torch.long)).valid.all()


def test_terminated_and_truncated_together_are_terminated(staggered):
    inner = SyncVectorEnv(staggered)
    env = GymVectorEnvAdapter(inner)
    env.reset()
    step = inner.step
    inner.step = lambda actions: (*step(actions)[:2], np.ones(3, bool), np.ones(3, bool), {})
    record = env.step(torch.zeros(3, dtype=torch.long))
    assert record.terminated.all()
    assert not record.truncated.any()
