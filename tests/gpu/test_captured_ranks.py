"""Ranks on a GPU: collectives in CUDA graphs, and processes that share one GPU."""

import pytest
import torch
import torch.distributed as dist

from canter.bench import Workload, in_ranks, measure_one
from canter.execution.executor import Executor
from canter.utils.distributed import RANKS

pytestmark = pytest.mark.gpu


def test_a_collective_of_nccl_is_captured_in_a_cuda_graph(monkeypatch):
    """With a group of one rank, whose mean is the tensor itself; NCCL still launches its work on the stream."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(RANKS, "group", dist.group.WORLD)
    monkeypatch.setattr(RANKS, "backend", "cpu:gloo,cuda:nccl")
    device = torch.device("cuda")
    executor, total = Executor(device, "graph"), torch.zeros(4, device=device)

    def step(row):
        total.add_(row)
        torch.ops.canter.all_reduce_(total)
        every = torch.empty_like(total)
        torch.ops.canter.all_gather_(every, total)
        return every * 2.0

    try:
        found = [float(executor.run("step", step, torch.full((4,), float(n), device=device))[0]) for n in range(8)]
        assert executor.eager_only == {}
        assert len(executor.graphs) == 1
        assert found == [2.0 * sum(range(n + 1)) for n in range(8)]
    finally:
        dist.destroy_process_group()


def test_two_ranks_share_a_gpu():
    work = Workload(num_envs=64, hidden_dims=(32,))
    timing = in_ranks(2, measure_one, work, device="cuda", warm_up=1, iterations=2)
    assert timing.num_steps == 2 * 64 * 24
