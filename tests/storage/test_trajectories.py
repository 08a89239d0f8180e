"""Splitting rollouts at episode ends."""

import pytest
import torch

from canter.storage.trajectories import (
    episode_starts,
    split_and_pad_trajectories,
    start_positions,
    trajectories_from_masks,
    trajectory_index,
    unpad_trajectories,
)

# T = 6: env a ends after step 3, env b after steps 1 and 4
DONES = torch.tensor([[0, 0], [0, 1], [0, 0], [1, 0], [0, 1], [0, 0]]).bool()
IDS = 100 * torch.arange(2.0) + torch.arange(6.0)[:, None]  # (T, N): 100 * env + step


def random_dones(seed, num_steps=7, num_envs=4):
    return torch.rand(num_steps, num_envs, generator=torch.Generator().manual_seed(seed)) < 0.35


def test_the_documented_example_has_trajectories_of_4_2_2_3_1_steps():
    padded, masks = split_and_pad_trajectories(IDS[..., None], DONES)
    assert padded.shape == (6, 5, 1)
    assert masks.sum(0).tolist() == [4, 2, 2, 3, 1]
    assert padded[..., 0].T.tolist() == [
        [0, 1, 2, 3, 0, 0],
        [4, 5, 0, 0, 0, 0],
        [100, 101, 0, 0, 0, 0],
        [102, 103, 104, 0, 0, 0],
        [105, 0, 0, 0, 0, 0],
    ]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32])
def test_row_and_column_are_those_of_the_drawing(dtype):
    starts = episode_starts(DONES.to(dtype))
    row, column = trajectory_index(starts)
    assert row.T.tolist() == [[0, 1, 2, 3, 0, 1], [0, 1, 0, 1, 2, 0]]
    assert column.T.tolist() == [[0, 0, 0, 0, 1, 1], [2, 2, 3, 3, 3, 4]]
    # flat (T * N) positions of a0, a4, b0, b2, b5
    assert start_positions(starts, column, 5).tolist() == [0, 8, 1, 5, 11]


@pytest.mark.parametrize("trailing", [(), (3,), (2, 3)])
def test_unpadding_inverts_padding_and_keeps_every_step_once(trailing):
    for seed in range(20):
        dones = random_dones(seed)
        x = torch.arange(1.0, 29.0).view(7, 4, *[1] * len(trailing)).expand(7, 4, *trailing)
        padded, masks = split_and_pad_trajectories(x, dones.unsqueeze(-1))
        assert torch.equal(unpad_trajectories(padded, masks), x)
        assert padded[masks].sum() == padded.sum() == x.sum()
        assert masks.sum() == 28


def test_the_index_can_be_recovered_from_the_masks():
    for seed in range(20):
        dones = random_dones(seed)
        masks = split_and_pad_trajectories(torch.ones(7, 4), dones)[1]
        row, column = trajectory_index(episode_starts(dones))
        found = trajectories_from_masks(masks)
        assert torch.equal(found.row, row)
        assert torch.equal(found.column, column)
        assert found.total == masks.shape[1]


def test_empty_columns_after_the_trajectories_are_ignored():
    _, masks = split_and_pad_trajectories(IDS, DONES)
    wider = torch.cat([masks, torch.zeros(6, 2, dtype=torch.bool)], 1)
    found, exact = trajectories_from_masks(wider), trajectories_from_masks(masks)
    assert torch.equal(found.row, exact.row)
    assert torch.equal(found.column, exact.column)
    assert found.total == 7
