"""Replay buffers contain exactly the last steps, each with the observation that followed it."""

import copy

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from no_host_sync import NoHostSync

from canter.envs.wrap import wrap_env
from canter.storage.replay import PrioritizedReplayBuffer, SumTree, TransitionReplayBuffer
from canter.storage.rollout_storage import Field
from canter.utils.memory import check_memory, readable


class Episodes(gymnasium.Env):
    """Observation (env, episode, step), reward 100 * env + step; odd episodes are cut off, even ones terminate."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,))
    action_space = spaces.Discrete(5)

    def __init__(self, index=0, length=3):
        self.index, self.length, self.episode, self.t = index, length, -1, 0

    def _obs(self):
        return np.array([self.index, self.episode, self.t], np.float32)

    def reset(self, *, seed=None, options=None):
        self.episode += 1
        self.t = 0
        return self._obs(), {}

    def step(self, action):
        self.t += 1
        is_end, is_odd = self.t >= self.length, self.episode % 2 == 1
        return self._obs(), 100.0 * self.index + self.t, is_end and not is_odd, is_end and is_odd, {}


LENGTHS = (2, 3, 5)


def vector_env(mode):
    fns = [lambda i=i, n=n: Episodes(i, n) for i, n in enumerate(LENGTHS)]
    return wrap_env(SyncVectorEnv(fns, autoreset_mode=mode), "cpu")


class TimeOutsOnly:
    """rsl_rl 2.x style: resets inside step, says only which ends were time-outs, gives no final observation."""

    num_envs, num_actions, device, max_episode_length = 3, 2, "cpu", 10

    def __init__(self):
        self.t = torch.zeros(3)
        self.episode = torch.zeros(3)
        self.episode_length_buf = torch.zeros(3, dtype=torch.long)

    @property
    def obs(self):
        return torch.stack([torch.arange(3).float(), self.episode, self.t], 1)

    def get_observations(self):
        return self.obs, {"observations": {}}

    def step(self, actions):
        self.t += 1
        reward = 100.0 * torch.arange(3) + self.t
        done = self.t >= torch.tensor(LENGTHS)
        time_outs = done & (self.episode % 2 == 1)
        self.episode += done
        self.t = self.t.masked_fill(done, 0.0)
        return self.obs, reward, done.long(), {"observations": {}, "time_outs": time_outs}


def fill(env, buffer, num_steps):
    """Run as an algorithm does; a time-out without a final observation leads back to where the step began."""
    obs, _ = env.reset()
    for step in range(num_steps):
        actions = torch.full((env.num_envs,), step % 5)
        record = env.step(actions if isinstance(env.action_space, spaces.Discrete) else torch.zeros(env.num_envs, 2))
        if record.final_obs is None:
            after = torch.where(record.truncated.unsqueeze(1), obs, record.obs)
        else:
            after = torch.where(record.done.unsqueeze(1), record.final_obs, record.obs)
        ends = {"truncated": record.truncated, "valid": record.valid}
        buffer.add(obs, actions, record.reward, after, record.terminated, **ends)
        obs = record.obs


def stored(buffer):
    """Every step that can be drawn, in the order of `order`, per environment."""
    out = []
    for env in range(buffer.num_envs):
        count, size = int(buffer.count[env]), int(buffer.size[env])
        slots = torch.arange(count - size, count) % buffer.num_rows * buffer.num_envs + env
        rows = buffer.data["order"][slots].long()
        out.append(buffer.take(rows, torch.full_like(rows, env), 1, 0.9))
    return out


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("capacity", [1000, 24])
def test_no_stored_step_joins_two_episodes_and_cut_ones_lead_to_their_final_observation(mode, capacity):
    env = vector_env(mode)
    buffer = TransitionReplayBuffer(capacity, (3,), num_envs=3, has_invalid_steps=env.has_invalid_steps)
    fill(env, buffer, 40)
    for index, batch in enumerate(stored(buffer)):
        assert len(batch.obs) > 3
        assert (batch.obs[:, 0] == index).all()
        assert (batch.next_obs[:, 2] - batch.obs[:, 2] == 1).all()  # a step on, in the same episode: no reset row
        assert (batch.next_obs[:, 1] == batch.obs[:, 1]).all()
        assert (batch.rewards == 100.0 * index + batch.next_obs[:, 2]).all()
        is_last, is_odd = batch.next_obs[:, 2] == LENGTHS[index], batch.obs[:, 1] % 2 == 1
        assert is_last.any()
        assert torch.equal(batch.dones.bool(), is_last & ~is_odd)
        order = batch.obs[:, 1] * 10 + batch.obs[:, 2]
        assert (order[1:] > order[:-1]).all(), "oldest to newest, each once"


def test_the_modes_of_resetting_store_the_same_data():
    found = []
    for mode in (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED):
        env = vector_env(mode)
        buffer = TransitionReplayBuffer(1000, (3,), num_envs=3, has_invalid_steps=env.has_invalid_steps)
        fill(env, buffer, 40)
        found.append(stored(buffer))
    for env in range(3):
        a, b, c = (rows[env] for rows in found)
        n = min(len(a.obs), len(b.obs), len(c.obs))
        for other in (b, c):
            for name in ("obs", "rewards", "next_obs", "dones"):
                assert torch.equal(getattr(a, name)[:n], getattr(other, name)[:n]), name


def test_time_outs_without_a_final_observation_lead_back_to_where_their_step_began():
    env = wrap_env(TimeOutsOnly(), "cpu")
    buffer = TransitionReplayBuffer(1000, (3,), num_envs=3, has_invalid_steps=env.has_invalid_steps)
    fill(env, buffer, 30)
    for index, batch in enumerate(stored(buffer)):
        is_last, is_cut = batch.obs[:, 2] == LENGTHS[index] - 1, batch.obs[:, 1] % 2 == 1
        assert torch.equal(batch.dones.bool(), is_last & ~is_cut)
        assert torch.equal(batch.next_obs[is_last & is_cut], batch.obs[is_last & is_cut])
        assert (is_last & is_cut).any()
        assert (batch.next_obs[~is_last, 2] - batch.obs[~is_last, 2] == 1).all()
        assert (batch.next_obs[~is_last, 1] == batch.obs[~is_last, 1]).all()


# ---------------------------------------------------------------------- windows
def history(num_envs, num_steps, seed=0):
    """Steps with ids in their observations and episodes that end at random, both ways."""
    draw = torch.Generator().manual_seed(seed)
    episode, t, steps = torch.zeros(num_envs), torch.zeros(num_envs), []
    for _ in range(num_steps):
        obs = torch.stack([torch.arange(num_envs).float(), episode, t], 1)
        kind = torch.rand(num_envs, generator=draw)
        done, cut = kind < 0.15, (kind > 0.15) & (kind < 0.3)
        t = t + 1
        after = torch.stack([torch.arange(num_envs).float(), episode, t], 1)
        steps.append((obs, torch.rand(num_envs, generator=draw), after, done, cut))
        episode, t = episode + (done | cut), torch.where(done | cut, 0.0, t)
    return steps


def brute_force(steps, alive, gamma, n_step):
    """By definition, for every step alive: return, discount, done, next observation; keyed by (env, episode, t)."""
    found = {}
    for env in range(len(steps[0][0])):
        mine = [(o[env], float(r[env]), a[env], bool(d[env]), bool(c[env])) for o, r, a, d, c in steps]
        for i in range(len(mine) - alive[env], len(mine)):
            total, power = 0.0, 1.0
            for obs, reward, after, done, cut in mine[i : i + n_step]:
                total, power, last = total + power * reward, power * gamma, (after, done)
                if done or cut:
                    break
            found[tuple(mine[i][0].tolist())] = (total, power, last[1], last[0].tolist())
    return found


@pytest.mark.parametrize("n_step", [1, 2, 3, 5])
@pytest.mark.parametrize("num_envs", [1, 3])
def test_windows_equal_brute_force_with_the_head_at_every_position(n_step, num_envs):
    steps = history(num_envs, 60)
    buffer = TransitionReplayBuffer(9 * num_envs, (3,), num_envs=num_envs)
    heads = set()
    for t, (obs, reward, after, done, cut) in enumerate(steps):
        buffer.add(obs, torch.zeros(num_envs, dtype=torch.long), reward, after, done, truncated=cut)
        heads |= set(buffer.head.tolist())
        want = brute_force(steps[: t + 1], buffer.size.tolist(), 0.9, n_step)
        seen = set()
        for env in range(num_envs):
            count, size = int(buffer.count[env]), int(buffer.size[env])
            slots = torch.arange(count - size, count) % buffer.num_rows * num_envs + env
            rows = buffer.data["order"][slots].long()
            batch = buffer.take(rows, torch.full_like(rows, env), n_step, 0.9)
            for i in range(size):
                total, power, is_done, last = want[tuple(batch.obs[i].tolist())]
                seen.add(tuple(batch.obs[i].tolist()))
                assert float(batch.rewards[i]) == pytest.approx(total, abs=1e-6)
                assert float(batch.discounts[i]) == pytest.approx(power, abs=1e-6)
                assert bool(batch.dones[i]) == is_done
                assert batch.next_obs[i].tolist() == last
        assert seen == set(want)
    assert heads == set(range(buffer.num_rows))
    assert min(buffer.size) >= 4


def test_an_invalid_step_changes_nothing():
    buffer = TransitionReplayBuffer(8, (1,), num_envs=2, has_invalid_steps=True)
    no, yes = torch.zeros(2, dtype=torch.bool), torch.ones(2, dtype=torch.bool)
    for t in range(9):
        obs = torch.full((2, 1), float(t))
        buffer.add(obs, torch.zeros(2), torch.ones(2), obs + 1, no, valid=yes)
    before = buffer.state_dict()
    other = torch.full((2, 1), 77.0)
    buffer.add(other, torch.ones(2), torch.full((2,), 5.0), other, yes, truncated=yes, valid=no)
    after = buffer.state_dict()
    for name in ("head", "count", "size"):
        assert torch.equal(before[name], after[name]), name
    for name in before["data"]:
        assert torch.equal(before["data"][name], after["data"][name]), name


def test_sampling_is_uniform_over_what_is_stored():
    steps = history(3, 25)
    buffer = TransitionReplayBuffer(36, (3,), num_envs=3)
    for obs, reward, after, done, cut in steps:
        buffer.add(obs, torch.zeros(3), reward, after, done, truncated=cut)
    batch = buffer.draw(60_000, 1, 0.9, torch.Generator().manual_seed(1))
    ids, counts = torch.unique(batch.obs, dim=0, return_counts=True)
    assert len(ids) == len(buffer)
    share = counts / 60_000 * len(buffer)
    assert share.min() > 0.85
    assert share.max() < 1.15


# ---------------------------------------------------------------------- the documented calls
@pytest.mark.parametrize(("shape", "dtype"), [((), torch.long), ((2,), torch.float32)], ids=["discrete", "box"])
def test_samples_have_the_documented_keys_and_shapes(shape, dtype):
    buffer = TransitionReplayBuffer(5, (3,), shape, action_dtype=dtype)
    for i in range(7):
        obs = torch.full((1, 3), float(i))
        buffer.add(obs, torch.full((1, *shape), i, dtype=dtype), torch.tensor([float(i)]), obs + 1, torch.tensor([0]))
    assert len(buffer) == 5
    batch = buffer.sample(4)
    assert {"observations", "actions", "rewards", "next_observations", "dones"} <= set(batch)
    assert batch["actions"].shape == (4, *shape)
    assert batch["actions"].dtype == dtype
    assert batch["observations"].shape == batch["next_observations"].shape == (4, 3)
    assert (batch["next_observations"] - batch["observations"] == 1).all()
    assert batch["rewards"].min() >= 2, "the first two were overwritten"
    assert torch.equal(batch["rewards"], batch["observations"][:, 0])


def test_a_step_from_another_observation_ends_the_episode_before_it():  # documented add() cannot say so
    buffer = TransitionReplayBuffer(10, (1,))
    no = torch.tensor([0])
    buffer.add(torch.tensor([[1.0]]), no, torch.tensor([1.0]), torch.tensor([[2.0]]), no)
    buffer.add(torch.tensor([[50.0]]), no, torch.tensor([7.0]), torch.tensor([[51.0]]), no)
    (batch,) = stored(buffer)
    assert batch.next_obs.flatten().tolist() == [2.0, 51.0]
    rows = buffer.data["order"][:2].long()
    assert buffer.take(rows, 0, 3, 0.5).rewards.tolist() == [1.0, 7.0]


def test_nested_observations_keep_their_kinds_and_the_critic_its_own():
    shapes = {"image": Field((2, 2), dtype=torch.uint8), "state": {"speed": (3,)}}
    buffer = TransitionReplayBuffer(6, shapes, (1,), action_dtype=torch.float32, critic_obs_shape=(4,))

    def obs(i):
        tree = {"image": torch.full((1, 2, 2), i, dtype=torch.uint8), "state": {"speed": torch.full((1, 3), i / 2)}}
        return tree, torch.full((1, 4), -float(i))

    for i in range(4):
        (now, critic), (after, next_critic) = obs(i), obs(i + 1)
        no = torch.tensor([False])
        buffer.add(now, torch.zeros(1, 1), torch.zeros(1), after, no, critic_obs=critic, next_critic_obs=next_critic)
    batch = buffer.sample(4)
    assert batch["observations"]["image"].dtype == torch.uint8
    ids = batch["observations"]["image"][:, 0, 0].float()
    assert torch.equal(batch["observations"]["state"]["speed"][:, 0], ids / 2)
    assert torch.equal(batch["next_observations"]["state"]["speed"][:, 0], (ids + 1) / 2)
    assert torch.equal(batch["critic_observations"][:, 0], -ids)
    assert torch.equal(batch["next_critic_observations"][:, 0], -ids - 1)


def same_content(a, b):
    """Whether two buffers hold the same, bit by bit."""
    both = [{**buffer.data, **{name: getattr(buffer, name) for name in buffer.state_names}} for buffer in (a, b)]
    return all(torch.equal(both[0][name], both[1][name]) for name in both[0])


@pytest.mark.parametrize("has_invalid_steps", [False, True])
def test_a_single_environment_is_stored_by_array_as_by_tensor(has_invalid_steps):
    shapes = {"image": Field((2, 2), dtype=torch.uint8), "speed": (3,)}
    kind = {"action_shape": (2,), "action_dtype": torch.float32, "critic_obs_shape": (4,)}
    kind["extra_fields"] = {"energy": Field((3,)), "is_odd": Field((), dtype=torch.bool)}
    tensors, arrays = (TransitionReplayBuffer(9, shapes, **kind, has_invalid_steps=has_invalid_steps) for _ in range(2))
    assert arrays.is_numpy
    tensors.is_numpy = False
    generator = torch.Generator().manual_seed(0)

    def observe():
        image = torch.randint(3, (1, 2, 2), generator=generator).to(torch.uint8)
        return {"image": image, "speed": torch.rand(1, 3, generator=generator)}, torch.rand(1, 4, generator=generator)

    after = observe()
    for i in range(60):
        terminated, cut, valid, moves_on = (
            torch.rand(4, 1, generator=generator) < torch.tensor([[0.1, 0.1, 0.8, 0.8]]).T
        )
        now, after = after if moves_on else observe(), observe()
        args = (now[0], torch.rand(1, 2, generator=generator), torch.rand(1, generator=generator), after[0], terminated)
        rest = {"truncated": cut & ~terminated, "critic_obs": now[1], "next_critic_obs": after[1], "valid": valid}
        rest["fields"] = {"energy": torch.rand(1, 3, generator=generator), "is_odd": torch.tensor([i % 2 == 1])}
        tensors.add(*args, **rest)
        arrays.add(*args, **rest)
        assert same_content(tensors, arrays), i
    assert len(arrays) == len(tensors) > 0


@pytest.mark.parametrize("num_envs", [1, 3])
def test_several_steps_at_once_are_stored_as_one_by_one(num_envs):
    """Episodes of 1 to 4 steps in the second environment of three, or in the only one."""
    env, generator = num_envs // 2, torch.Generator().manual_seed(1)
    kind = {"num_envs": num_envs, "has_invalid_steps": num_envs > 1, "extra_fields": {"twice": Field(())}}
    single, bulk = (TransitionReplayBuffer(7 * num_envs, (1,), **kind) for _ in range(2))
    valid = torch.arange(num_envs) == env
    for number in range(9):
        length, is_terminal = int(torch.randint(1, 5, (), generator=generator)), number % 2 == 0
        ids = 100.0 * number + torch.arange(length + 1.0)
        ends = torch.arange(length) == length - 1
        done, cut = ends & is_terminal, ends & (not is_terminal)
        for t in range(length):
            now, after, reward = (torch.full((num_envs, 1), float(x)) for x in (ids[t], ids[t + 1], -ids[t]))
            flags = {"truncated": cut[t].expand(num_envs), "valid": valid, "fields": {"twice": 2 * now}}
            single.add(now, torch.zeros(num_envs), reward, after, done[t].expand(num_envs), **flags)
        args = (ids[:-1, None], torch.zeros(length), -ids[:-1], ids[-1:, None], done)
        bulk.add(*args, truncated=cut, fields={"twice": 2 * ids[:-1]}, env=env)
        assert len(single) == len(bulk)
        for one, many in zip(stored(single), stored(bulk), strict=True):
            for name in ("obs", "rewards", "next_obs", "dones"):
                assert torch.equal(getattr(one, name), getattr(many, name)), name
            assert torch.equal(many.fields["twice"], 2 * many.obs[:, 0])
    assert len(bulk) >= 4


def test_a_copied_buffer_has_memory_of_its_own():
    def put(buffer, i):
        obs, no = torch.full((1, 1), float(i)), torch.tensor([False])
        buffer.add(obs, torch.tensor([0]), torch.tensor([10.0 + i]), obs + 1, no, truncated=no)

    first = TransitionReplayBuffer(8, (1,))
    put(first, 0)
    second = copy.deepcopy(first)
    put(second, 1)
    assert (len(first), len(second)) == (1, 2)
    assert first.data["rewards"][:2].tolist() == [10.0, 0.0]
    assert second.data["rewards"][:2].tolist() == [10.0, 11.0]


def test_a_loaded_buffer_continues_exactly():
    steps = history(2, 30)
    whole, first, second = (TransitionReplayBuffer(22, (3,), num_envs=2) for _ in range(3))
    for i, (obs, reward, after, done, cut) in enumerate(steps):
        for buffer in (whole, first if i < 17 else second):
            if i == 17 and buffer is second:
                second.load_state_dict(first.state_dict())
            buffer.add(obs, torch.zeros(2), reward, after, done, truncated=cut)
    a, b = (buffer.draw(500, 3, 0.9, torch.Generator().manual_seed(2)) for buffer in (whole, second))
    for name in ("obs", "rewards", "next_obs", "dones", "discounts"):
        assert torch.equal(getattr(a, name), getattr(b, name))


def test_adding_and_drawing_never_wait_for_the_device():
    buffer = TransitionReplayBuffer(30, (3,), num_envs=3, has_invalid_steps=True)
    obs, valid = torch.rand(3, 3), torch.tensor([True, False, True])
    with NoHostSync():
        for _ in range(3):
            buffer.add(obs, torch.zeros(3), torch.zeros(3), obs + 1, torch.zeros(3), valid=valid)
        buffer.draw(8, 3, 0.9, None)


# ---------------------------------------------------------------------- what is refused
def test_bad_sizes_are_refused():
    with pytest.raises(ValueError, match="capacity must be at least"):
        TransitionReplayBuffer(0, (3,))
    buffer = TransitionReplayBuffer(5, (3,))
    with pytest.raises(ValueError, match="1 environments was expected, observations has 2"):
        buffer.add(torch.zeros(2, 3), torch.zeros(2), torch.zeros(2), torch.zeros(2, 3), torch.zeros(2))
    with pytest.raises(ValueError, match="batch_size=4 is larger than the 0 stored steps"):
        buffer.sample(4)


def test_the_state_of_a_different_buffer_is_refused():
    state = TransitionReplayBuffer(5, (3,)).state_dict()
    with pytest.raises(ValueError, match="capacity=5, this one 6"):
        TransitionReplayBuffer(6, (3,)).load_state_dict(state)
    with pytest.raises(ValueError, match=r"\(3,\).*'observations', this one needs \(4,\)"):
        TransitionReplayBuffer(5, (4,)).load_state_dict(state)


def test_a_buffer_that_does_not_fit_is_refused_with_the_arithmetic():
    with pytest.raises(MemoryError, match=r"rows x 1 environments x \(.*observations.*\) bytes = .*TiB, but cpu has"):
        TransitionReplayBuffer(10**12, (84, 84, 3), obs_dtype=torch.uint8)
    fields = {"a": Field((10,)), "b": Field((), dtype=torch.bool)}
    assert check_memory("replay buffer", fields, 100, 2, torch.device("cpu"), "") == 200 * 41
    assert readable(3 * 2**20) == "3 MiB"


# Priorities.
@pytest.mark.parametrize("length", [1, 64, 65, 5000])
def test_a_sum_tree_finds_what_running_sums_find(length):
    generator = torch.Generator().manual_seed(length)
    numbers = torch.randint(0, 4, (length,), generator=generator).double()
    numbers[-1] = 1.0
    tree = SumTree(length, torch.device("cpu"))
    tree.fill(numbers)
    assert tree.total == numbers.sum()
    amounts = torch.rand(1000, generator=generator, dtype=torch.float64) * numbers.sum()
    assert torch.equal(tree.find(amounts), torch.searchsorted(numbers.cumsum(0), amounts, right=True))
    places = torch.randint(0, length, (50,), generator=generator)
    numbers[places] = 7.0
    tree.put(places, numbers[places])
    other = SumTree(length, torch.device("cpu"))
    other.fill(numbers)
    assert all(torch.equal(a, b) for a, b in zip(tree.levels, other.levels, strict=True))


def test_a_sum_tree_never_finds_a_zero():
    tree = SumTree(200, torch.device("cpu"))
    numbers = torch.zeros(200, dtype=torch.float64)
    numbers[[3, 70]] = 0.1
    tree.fill(numbers)
    beyond = torch.tensor([0.0, 0.0999, 0.1, 0.2, 0.2 + 1e-12, 1.0], dtype=torch.float64)
    assert tree.find(beyond).tolist() == [3, 3, 70, 70, 70, 70]


@pytest.mark.parametrize("num_envs", [1, 3])
def test_the_sums_of_priorities_follow_every_change_of_the_buffer(num_envs):
    replay = PrioritizedReplayBuffer(12 * num_envs, (1,), num_envs=num_envs, has_invalid_steps=True)
    generator = torch.Generator().manual_seed(0)

    def check():
        fresh = SumTree(replay.num_rows * num_envs, torch.device("cpu"))
        fresh.fill(replay.tree.levels[0])
        assert all(torch.equal(a, b) for a, b in zip(fresh.levels, replay.tree.levels, strict=True))
        wanted = torch.where(replay.data["holds_step"], replay.data["priorities"] ** 0.6, 0.0).double()
        torch.testing.assert_close(fresh.levels[0][: len(wanted)], wanted)

    for i in range(40):
        obs = torch.full((num_envs, 1), float(100 * (i // 5) + i))  # every fifth step leaves the last episode
        end = torch.rand(num_envs, generator=generator) < 0.2
        valid = torch.rand(num_envs, generator=generator) < 0.8
        zero = torch.zeros(num_envs)
        replay.add(obs, zero.long(), zero, obs + 1, zero.bool(), truncated=end, valid=valid)
        check()
        if len(replay) > 4:
            batch = replay.draw(4, 1, 0.9, generator)
            assert replay.data["holds_step"][batch.places].all()
            same = torch.unique(batch.places, return_inverse=True)[1]
            replay.set_priorities(batch.places, torch.randn(4, generator=generator)[same])
            check()
    other = PrioritizedReplayBuffer(12 * num_envs, (1,), num_envs=num_envs, has_invalid_steps=True)
    other.load_state_dict(replay.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(other.tree.levels, replay.tree.levels, strict=True))
    replay.clear()
    assert replay.tree.total == 0
