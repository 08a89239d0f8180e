"""Waiting steps: a block has every step in its place, and a value to bootstrap from for each."""

import torch

from canter.envs.vec_env import StepRecord
from canter.storage.waiting_steps import WaitingSteps


def numbers(step, offset=0.0):
    """100 * env + step, (2,), for two environments."""
    return torch.tensor([0.0, 100.0]) + step + offset


def waiting_steps(final_at=(), critic=False):
    waiting = WaitingSteps()
    waiting.limit = 3
    for t in range(3):
        final = numbers(t, 0.5).view(2, 1) if t in final_at else None
        flags = torch.tensor([t == 1, False])
        acted = {"observations": {"a": numbers(t).view(2, 1)}, "params": {"sigma": torch.tensor([float(t)])}}
        acted["critic_observations"] = numbers(t, 0.25).view(2, 1) if critic else None
        waiting.steps.append((acted, StepRecord(None, None, numbers(t), ~flags, flags, final, final, flags, {})))
    assert waiting.is_full
    return waiting


def test_a_block_has_the_steps_in_their_order():
    waiting = waiting_steps()
    step, record = waiting.take()
    rows = torch.tensor([[0.0, 100.0], [1.0, 101.0], [2.0, 102.0]])
    assert torch.equal(step["observations"]["a"], rows.unsqueeze(-1))
    assert torch.equal(record.reward, rows)
    assert step["params"]["sigma"].tolist() == [[0.0], [1.0], [2.0]]
    assert record.truncated.tolist() == [[False, False], [True, False], [False, False]]
    assert torch.equal(record.terminated, ~record.truncated)
    assert (step["critic_observations"], record.final_critic_obs, waiting.steps) == (None, None, [])


def test_where_no_final_observation_is_known_the_one_before_the_step_stands_for_it():
    record = waiting_steps(final_at=[1], critic=True).take()[1]
    assert record.final_critic_obs.squeeze(-1).tolist() == [[0.25, 100.25], [1.5, 101.5], [2.25, 102.25]]


def test_no_step_waits_after_stop():
    waiting = waiting_steps()
    waiting.stop()
    assert (waiting.limit, waiting.steps) == (0, [])
