import random

import numpy as np
import pytest
import torch

from canter.utils.checkpoint import load_checkpoint, save_checkpoint
from canter.utils.rng import generator_state, rng_state, seed_everything, set_generator_state, set_rng_state


def draw():
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(()).item()]


def test_seed_repeats_every_generator_and_other_seeds_differ():
    seed_everything(3)
    first = draw()
    seed_everything(3)
    assert draw() == first
    seed_everything(4)
    assert all(a != b for a, b in zip(first, draw(), strict=True))


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seed_out_of_range_is_refused(seed):
    with pytest.raises(ValueError, match=str(seed)):
        seed_everything(seed)


def test_state_survives_a_checkpoint_and_continues_exactly(tmp_path):
    seed_everything(5)
    draw()  # leaves a cached second gaussian in python's and numpy's generator
    save_checkpoint(tmp_path / "model_1.pt", {"rng": rng_state()})
    want = [draw() for _ in range(3)]
    seed_everything(6)
    set_rng_state(load_checkpoint(tmp_path / "model_1.pt")["rng"])
    assert [draw() for _ in range(3)] == want


@pytest.mark.parametrize("kind", ["PCG64", "MT19937", "Philox"])
def test_numpy_generator_continues_exactly(tmp_path, kind):
    def make(seed):
        return np.random.Generator(getattr(np.random, kind)(seed))

    generator = make(1)
    generator.integers(9, size=3, dtype=np.int32)  # leaves half a word cached
    save_checkpoint(tmp_path / "model_1.pt", {"noise": generator_state(generator)})
    want = generator.integers(1000, size=700, dtype=np.int32)
    other = make(2)
    set_generator_state(other, load_checkpoint(tmp_path / "model_1.pt")["noise"])
    assert (other.integers(1000, size=700, dtype=np.int32) == want).all()


def test_torch_generator_continues_exactly():
    generator = torch.Generator().manual_seed(1)
    torch.randn(3, generator=generator)
    state = generator_state(generator)
    want = torch.randn(5, generator=generator)
    other = torch.Generator().manual_seed(2)
    set_generator_state(other, state)
    assert torch.equal(torch.randn(5, generator=other), want)


def test_state_of_the_wrong_kind_is_refused():
    with pytest.raises(TypeError, match="is a tensor, got dict"):
        set_generator_state(torch.Generator(), {})
    with pytest.raises(TypeError, match="is a dict, got a tensor"):
        set_generator_state(np.random.default_rng(0), torch.zeros(1))


@pytest.mark.gpu
def test_cuda_generators_continue_exactly(tmp_path):
    seed_everything(5)
    torch.rand(3, device="cuda")
    save_checkpoint(tmp_path / "model_1.pt", {"rng": rng_state()})
    want = torch.rand(5, device="cuda")
    seed_everything(6)
    # Loading onto the GPU moves the states too, which generators take on the CPU only.
    set_rng_state(load_checkpoint(tmp_path / "model_1.pt", map_location="cuda")["rng"])
    assert torch.equal(torch.rand(5, device="cuda"), want)
