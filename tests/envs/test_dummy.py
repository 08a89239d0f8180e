import pytest
import torch

from canter.envs.dummy import DummyVecEnv


def test_episodes_end_at_the_time_limit_with_the_observation_before_the_reset():
    env = DummyVecEnv(4, 6, 2, max_episode_length=3)
    env.reset()
    env.episode_length_buf = torch.tensor([0, 1, 2, 0])
    records = [env.step(torch.zeros(4, 2)) for _ in range(3)]
    assert [r.truncated.tolist() for r in records] == [
        [False, False, True, False],
        [False, True, False, False],
        [True, False, False, True],
    ]
    for record in records:
        ended = record.truncated
        assert torch.equal(record.obs[~ended], record.final_obs[~ended])
        assert (record.obs[ended] != record.final_obs[ended]).all()
        assert not record.terminated.any()
        assert torch.equal(record.extras["final_observation"], record.final_obs)
    assert not torch.equal(records[0].final_obs, records[1].final_obs)
    assert not torch.equal(records[0].reward, records[1].reward)


def test_the_critic_can_have_a_wider_observation():
    env = DummyVecEnv(4, 6, 2, num_privileged_obs=9)
    assert (env.num_obs, env.num_privileged_obs, env.num_actions) == (6, 9, 2)
    record = env.step(torch.zeros(4, 2))
    assert record.critic_obs.shape == record.final_critic_obs.shape == (4, 9)
    assert record.extras["final_observation"]["critic_obs"] is record.final_critic_obs
    plain = DummyVecEnv(4).step(torch.zeros(4, 12))
    assert plain.critic_obs is plain.obs


def test_state_continues_exactly():
    env = DummyVecEnv(4, 6, 2, max_episode_length=5)
    for _ in range(7):
        env.step(torch.zeros(4, 2))
    state = env.get_state()
    first = [env.step(torch.zeros(4, 2)) for _ in range(6)]
    other = DummyVecEnv(4, 6, 2, max_episode_length=5)
    other.set_state(state)
    for record in first:
        again = other.step(torch.zeros(4, 2))
        assert torch.equal(again.obs, record.obs)
        assert torch.equal(again.truncated, record.truncated)


def test_actions_of_another_width_are_refused():
    with pytest.raises(ValueError, match=r"actions have shape \(4, 3\); wanted \(4, 2\)"):
        DummyVecEnv(4, 6, 2).step(torch.zeros(4, 3))
