"""Memory is computed before it is allocated, and what does not fit is refused."""

import pytest
import torch

from canter.envs.torch_envs import PointRobot
from canter.envs.wrap import make_env
from canter.modules import ActorCritic
from canter.runners import OnPolicyRunner
from canter.utils import memory
from canter.utils.memory import MemoryLimit


@pytest.fixture
def few(monkeypatch):
    """A machine with 10 MiB of free memory."""
    monkeypatch.setattr(memory, "free_memory", lambda device: 10 << 20)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(3, 1 << 20),
        lambda: torch.zeros((3, 1 << 20), dtype=torch.float32),
        lambda: torch.ones(size=(3, 1 << 20)),
        lambda: torch.full((1 << 20, 3), 1e9),
        lambda: torch.randn(3 << 20),
        lambda: torch.zeros(1).new_zeros((3 << 20,)),
        lambda: torch.zeros(1).new_empty(3 << 20),
        lambda: torch.nn.Linear(3 << 10, 1 << 10),
        lambda: torch.nn.LSTM(1 << 10, 1 << 10),
    ],
)
def test_tensors_that_do_not_fit_together_are_refused_at_the_first_that_does_not(few, make):
    with MemoryLimit("the run"):
        torch.zeros(1 << 19)  # 2 MiB
        with pytest.raises(MemoryError, match=r"the run needs a tensor of shape .*MiB, but cpu has \d MiB left"):
            make()
    make()  # outside it


def test_the_dtype_counts_and_so_does_what_was_taken_before(few):
    with MemoryLimit("the run"):
        torch.zeros(9 << 20, dtype=torch.uint8)
        with pytest.raises(MemoryError, match=r"shape \(1048577,\), 1 MiB, but cpu has 1 MiB left for it; lower its s"):
            torch.zeros(1).new_empty((1 << 20) + 1, dtype=torch.int8)
        with pytest.raises(MemoryError, match=r"shape \(1048577,\), 8 MiB"):
            torch.zeros(1, dtype=torch.float64).new_empty((1 << 20) + 1)
        torch.zeros(1 << 18)  # exactly the rest


def test_sizes_that_no_machine_has_are_refused_without_an_allocation():
    sizes = {"actor_hidden_dims": [10**12, 8], "critic_hidden_dims": [8]}
    with pytest.raises(MemoryError, match=r"the run needs a tensor of shape \(10{12}, "):
        OnPolicyRunner(PointRobot(2), {"policy": sizes, "device": "cpu"}, show_progress=False)


def test_more_tensors_than_any_network_has_are_refused(monkeypatch):
    monkeypatch.setattr(memory, "MAX_TENSORS", 100)
    with (
        MemoryLimit("the run"),
        pytest.raises(MemoryError, match="more than 100 tensors; give it fewer lay"),
    ):
        torch.nn.LSTM(2, 2, num_layers=10**9)


def test_a_policy_within_the_limit_is_the_same_as_without_it():
    torch.manual_seed(0)
    free = ActorCritic(6, 6, 2, actor_hidden_dims=[8], critic_hidden_dims=[8]).state_dict()
    torch.manual_seed(0)
    with MemoryLimit("the run"):
        limited = ActorCritic(6, 6, 2, actor_hidden_dims=[8], critic_hidden_dims=[8]).state_dict()
    assert all(torch.equal(limited[name], value) for name, value in free.items())


@pytest.mark.parametrize("name", ["CartPole-v1", "canter/CartPole"])
def test_more_environments_than_fit_are_refused_before_the_first_is_made(name):
    with pytest.raises(MemoryError, match=r"^1,000,000,000,000 environments need at least 931.3 TiB, but .* are free"):
        make_env(name, num_envs=10**12)


def test_more_worker_processes_than_fit_are_refused_before_the_first_is_started():
    with pytest.raises(MemoryError, match=r"1,000,000 environments in 1,000,000 processes need at least 15.3 TiB"):
        make_env("CartPole-v1", num_envs=10**6, num_workers=10**6)


def test_windows_that_do_not_fit_are_refused():
    with pytest.raises(MemoryError, match=r"a wrapper of the environments needs a tensor of shape \(4, 10{12}, 2\)"):
        make_env("canter/PointRobot", num_envs=4, components={"history": {"velocity": 10**12}})
