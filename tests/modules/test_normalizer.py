"""Running statistics: equal to those of all data at once, frozen when they should be, and never a host wait."""

import copy
import math

import numpy as np
import pytest
import torch

from canter.modules.normalizer import (
    DictNormalization,
    EmpiricalNormalization,
    NoNormalization,
    Normalize,
    Normalizer,
    ReturnScaler,
    RunningMeanStd,
)


def chunks(sizes, dim, scale=3.0, offset=2.0):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(size, dim, generator=g) * scale + offset for size in sizes]


@pytest.mark.parametrize("offset", [2.0, 1e4])
def test_statistics_equal_numpy_over_all_data(offset):
    data = chunks([1, 100, 37, 1000], 5, offset=offset)
    norm = EmpiricalNormalization(5)
    for chunk in data:
        norm.update(chunk)
    everything = torch.cat(data).double().numpy()
    np.testing.assert_allclose(norm.mean, everything.mean(0), rtol=1e-5)
    np.testing.assert_allclose(norm.std, everything.std(0), rtol=2e-3 if offset > 100 else 1e-5)
    assert norm.count.item() == 1138
    np.testing.assert_allclose(norm.mean, [offset] * 5, atol=0.4)


@pytest.mark.parametrize("shape", [(3, 4), (6,), (3, 2, 1)])
def test_values_of_another_shape_are_refused(shape):
    norm = EmpiricalNormalization(3)
    with pytest.raises(ValueError, match=r"the statistics are of values of shape \(3,\), got"):
        norm.update(torch.zeros(shape))
    assert norm.count == 0


def test_eval_mode_and_normalize_freeze_the_statistics():
    norm = EmpiricalNormalization(3)
    norm.update(torch.randn(10, 3))
    before = copy.deepcopy(norm.state_dict())
    norm.normalize(torch.full((10, 3), 50.0))
    norm.eval()
    norm(torch.full((10, 3), 50.0))
    assert all(torch.equal(before[name], value) for name, value in norm.state_dict().items())


def test_until_stops_once_enough_was_counted():
    norm = EmpiricalNormalization(1, until=1.0e2)
    for value in (1.0, 2.0, 9.0):
        norm.update(torch.full((60, 1), value))
    assert norm.count.item() == 120  # 60 < 100, so the second batch still counts
    assert norm.mean.item() == pytest.approx(1.5)


def test_inverse_undoes_normalisation():
    norm = EmpiricalNormalization(4)
    x = torch.randn(50, 4) * 7 - 3
    torch.testing.assert_close(norm.inverse(norm(x)), x, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_rows_that_cannot_be_squared_are_left_out(bad):
    good, norm = EmpiricalNormalization(2), EmpiricalNormalization(2)
    x = torch.arange(12.0).view(6, 2)
    spoilt = x.clone()
    spoilt[3, 1] = bad
    good.update(x[[0, 1, 2, 4, 5]])
    norm.update(spoilt)
    assert norm.count.item() == 5
    torch.testing.assert_close(norm.mean, good.mean)
    torch.testing.assert_close(norm.std, good.std)


def test_only_valid_rows_count():
    norm = EmpiricalNormalization(1)
    x = torch.tensor([[[1.0], [50.0]], [[3.0], [70.0]]])  # (T, N, 1)
    norm.update(x, valid=torch.tensor([[True, False], [True, False]]))
    assert (norm.count.item(), norm.mean.item(), norm.std.item()) == (2, 2.0, 1.0)
    norm.update(x, valid=torch.zeros(2, 2, dtype=torch.bool))
    assert (norm.count.item(), norm.mean.item(), norm.std.item()) == (2, 2.0, 1.0)
    norm.update(x[:0])
    assert (norm.count.item(), norm.mean.item(), norm.std.item()) == (2, 2.0, 1.0)


def test_statistics_can_be_updated_in_inference_mode_and_used_in_training():
    norm = EmpiricalNormalization(2)
    with torch.inference_mode():
        norm.update(torch.randn(5, 2))
    x = torch.randn(3, 2, requires_grad=True)
    norm.normalize(x).sum().backward()
    torch.testing.assert_close(x.grad, (1 / (norm.std + norm.eps)).expand(3, 2))


def test_statistics_travel_in_the_state_dict():
    norm, other = EmpiricalNormalization(2), EmpiricalNormalization(2)
    norm.update(torch.randn(9, 2) * 4)
    assert set(norm.state_dict()) == {"_mean", "_var", "_std", "count"}
    other.load_state_dict(norm.state_dict())
    x = torch.randn(4, 2)
    norm.update(x)
    other.update(x)
    assert torch.equal(norm.normalize(x), other.normalize(x))


def test_no_normalization_has_the_same_interface_and_does_nothing():
    norm = NoNormalization()
    x = torch.randn(3, 2)
    norm.update(x, torch.ones(3, dtype=torch.bool))
    assert norm(x) is norm.normalize(x) is norm.inverse(x) is x
    assert not norm.state_dict()


def test_dict_normalization_treats_float_vectors_and_lets_the_rest_pass():
    shapes = {"joints": (2,), "values": 3, "eye": (3, 4, 4), "deep": {"gait": [2], "phase": (1,)}, "skip": None}
    norm = DictNormalization(shapes, eps=0.0)
    obs = {
        "joints": torch.tensor([[0.0, 10.0], [4.0, 30.0]]),
        "values": torch.randn(2, 3),
        "eye": torch.rand(2, 3, 4, 4),
        "deep": {"gait": torch.tensor([[5, 6], [7, 8]]), "phase": torch.tensor([[1.0], [5.0]])},
        "skip": torch.randn(2, 6),
    }
    out = norm(obs)
    assert out["joints"].tolist() == [[-1.0, -1.0], [1.0, 1.0]]
    assert out["deep"]["phase"].tolist() == [[-1.0], [1.0]]
    assert out["eye"] is obs["eye"]
    assert out["deep"]["gait"] is obs["deep"]["gait"]
    assert out["skip"] is obs["skip"]
    torch.testing.assert_close(norm.inverse(out)["joints"], obs["joints"])
    norm.update(obs, valid=torch.tensor([False, False]))
    assert {int(v) for name, v in norm.state_dict().items() if name.endswith("count")} == {0, 2}  # 0: the integer leaf
    copied = DictNormalization(shapes, eps=0.0)
    copied.load_state_dict(norm.state_dict())
    torch.testing.assert_close(copied.eval()(obs)["values"], norm.normalize(obs)["values"])


def test_how_far_returns_reach_is_four_standard_deviations_beyond_their_mean():
    scaler = ReturnScaler(2, gamma=0.5, eps=0.0)
    assert scaler.reach().item() == 1.0  # nothing is known
    scaler.learn(torch.tensor([-2.0, -6.0]), torch.tensor([False, True]))
    assert scaler.reach().item() == 4.0 + 4 * 2.0
    assert scaler.returns.tolist() == [-2.0, 0.0]
    scaler.take(torch.tensor([-4.0, 5.0]), torch.tensor([True, False]))
    torch.testing.assert_close(scaler.reach().item(), 4.0 + 4 * math.sqrt(8 / 3))


def test_return_scaler_by_hand():
    scaler = ReturnScaler(2, gamma=0.5, eps=0.0, clip=10.0)
    done = torch.tensor([False, True])
    # returns 2, 6: mean 4, variance 4
    torch.testing.assert_close(scaler(torch.tensor([2.0, 6.0]), done), torch.tensor([1.0, 3.0]))
    # returns 0.5*2 + 1 = 2 and, after the reset, 10: all of 2, 6, 2, 10 have variance 11
    out = scaler(torch.tensor([1.0, 10.0]), ~done)
    torch.testing.assert_close(out, torch.tensor([1.0, 10.0]) / 11**0.5)
    assert scaler.returns.tolist() == [0.0, 10.0]
    assert (scaler.mean.item(), scaler.count.item()) == (5.0, 4)


def test_return_scaler_clips_freezes_in_eval_and_travels():
    scaler = ReturnScaler(2, gamma=0.9, clip=1.5)
    scaler(torch.tensor([1.0, 3.0]), torch.tensor([False, False]))
    before = copy.deepcopy(scaler.state_dict())
    assert scaler.eval()(torch.tensor([100.0, -100.0]), torch.tensor([True, True])).tolist() == [1.5, -1.5]
    assert all(torch.equal(before[name], value) for name, value in scaler.state_dict().items())
    other = ReturnScaler(2, gamma=0.9, clip=1.5)
    other.load_state_dict(before)
    reward, done = torch.tensor([0.3, 0.2]), torch.tensor([False, True])
    assert torch.equal(scaler.train()(reward, done), other(reward, done))
    assert torch.equal(scaler.returns, other.returns)


def test_a_broken_reward_does_not_spoil_the_scale():
    scaler = ReturnScaler(2, gamma=0.9)
    scaler(torch.tensor([float("nan"), 3.0]), torch.zeros(2))
    assert torch.isfinite(scaler.var)
    assert scaler.returns.tolist() == [0.0, 3.0]


def test_normalize_gives_unit_length():
    x = torch.randn(4, 3, 5) * 9
    out = Normalize()(x)
    torch.testing.assert_close(out.norm(dim=-1), torch.ones(4, 3))
    torch.testing.assert_close(out * x.norm(dim=-1, keepdim=True), x)


def test_running_mean_std_equals_numpy_of_everything():
    a, b = (chunk.numpy() for chunk in chunks([30, 70], 4))
    stats = RunningMeanStd(epsilon=1e-9, shape=(4,))
    stats.update(a)
    stats.update_from_moments(b.mean(0), b.var(0), len(b))
    stats.update(np.empty((0, 4)))
    everything = np.concatenate([a, b])
    np.testing.assert_allclose(stats.mean, everything.mean(0), rtol=1e-6)
    np.testing.assert_allclose(stats.var, everything.var(0), rtol=1e-6)
    assert stats.count == pytest.approx(100)


def test_normalizer_clips_and_torch_equals_numpy():
    norm = Normalizer((2,), clip_obs=1.5)
    norm.update(np.array([[0.0, 10.0], [4.0, 30.0]] * 50))
    x = np.array([[2.0, 20.0], [3.0, 25.0], [100.0, -900.0]])
    out = norm.normalize(x)
    np.testing.assert_allclose(out, [[0, 0], [0.5, 0.5], [1.5, -1.5]], atol=1e-3)
    frozen = norm.normalize_torch(torch.from_numpy(x).float(), "cpu", update=False)
    np.testing.assert_allclose(frozen, out, rtol=1e-4, atol=1e-6)
    assert norm.count == pytest.approx(100, abs=1e-3)


def test_normalize_torch_learns_first_unless_told_not_to():
    norm = Normalizer(1, epsilon=1e-9)
    out = norm.normalize_torch(torch.tensor([[1.0], [3.0]]), "cpu")
    assert norm.mean[0] == pytest.approx(2.0)
    torch.testing.assert_close(out, torch.tensor([[-1.0], [1.0]]))
    norm.normalize_torch(torch.tensor([[4.0], [8.0]], dtype=torch.bfloat16), "cpu")
    assert norm.mean[0] == pytest.approx(4.0)


class FakeRollouts:
    def feed_forward_generator_amp(self, num_mini_batch, mini_batch_size):
        assert num_mini_batch is None
        for value in (1.0, 3.0, 99.0):
            yield (torch.full((mini_batch_size, 2), value),)


class FakeExperts:
    batch_size = 4

    def __iter__(self):
        yield torch.full((4, 2), 5.0)
        yield torch.full((2, 2), 7.0), torch.full((2, 2), 7.0)


def test_update_normalizer_learns_from_pairs_of_batches():
    norm = Normalizer(2, epsilon=1e-9)
    norm.update_normalizer(FakeRollouts(), FakeExperts())
    assert norm.count == pytest.approx(16)  # two pairs of 4 + 4; the third policy batch has no partner
    np.testing.assert_allclose(norm.mean, [4.0, 4.0])


def test_numpy_statistics_travel_in_a_state_dict_that_loads_without_pickle(tmp_path):
    norm = Normalizer(2)
    norm.update(np.random.default_rng(0).normal(size=(20, 2)))
    torch.save(norm.state_dict(), tmp_path / "norm.pt")
    other = Normalizer(2)
    other.load_state_dict(torch.load(tmp_path / "norm.pt", weights_only=True))
    x = np.array([[0.3, -2.0]])
    np.testing.assert_array_equal(norm.normalize(x), other.normalize(x))
    other.update(x)
    assert other.count == norm.count + 1
    with pytest.raises(ValueError, match=r"\(2,\).*\(3,\)"):
        Normalizer(3).load_state_dict(norm.state_dict())


def test_a_least_standard_deviation_bounds_how_much_is_enlarged():
    torch.manual_seed(0)
    x = torch.randn(4000, 2) * torch.tensor([0.1, 3.0]) + 5.0
    norm = EmpiricalNormalization(2, eps=0.0, min_std=1.0)
    norm.update(x)
    torch.testing.assert_close(norm.normalize(x).std(0), torch.tensor([0.1, 1.0]), atol=0.01, rtol=0.0)
    torch.testing.assert_close(norm._var[0], x.var(0, correction=0))  # the statistics themselves are not bounded
    torch.testing.assert_close(norm.inverse(norm.normalize(x)), x)
    loaded = EmpiricalNormalization(2, eps=0.0)
    loaded.load_state_dict(norm.state_dict())
    assert torch.equal(loaded.normalize(x), norm.normalize(x))


def test_the_bound_of_normalised_values_is_saved_with_the_statistics():
    norm = EmpiricalNormalization(2, eps=0.0, clip=1.5)
    norm.update(torch.tensor([[-1.0, 0.0], [1.0, 20.0]]))  # mean 0 and 10, standard deviation 1 and 10
    x = torch.tensor([[0.5, 15.0], [-3.0, 40.0], [9.0, -90.0]])
    assert norm.normalize(x).tolist() == [[0.5, 0.5], [-1.5, 1.5], [1.5, -1.5]]
    plain, other = EmpiricalNormalization(2, eps=0.0), EmpiricalNormalization(2, eps=0.0, clip=5.0)
    for loaded in (plain, other):
        loaded.load_state_dict(norm.state_dict())
    assert (plain.clip, other.clip) == (1.5, 5.0)  # a bound that was asked for stays
    assert torch.equal(plain.normalize(x), norm.normalize(x))
    assert torch.equal(torch.jit.script(plain.eval())(x), norm.normalize(x))


def test_statistics_without_a_bound_load_where_there_is_one():
    old, norm = EmpiricalNormalization(2), EmpiricalNormalization(2, clip=3.0)
    assert old.state_dict().keys() == {"_mean", "_var", "_std", "count"}  # as before there was a bound
    norm.load_state_dict(old.state_dict())
    assert norm.clip == 3.0


def test_the_bound_of_a_dict_is_saved_for_each_part():
    norm = DictNormalization({"near": (2,), "image": (3, 4, 4)}, eps=0.0, clip=2.0)
    loaded = DictNormalization({"near": (2,), "image": (3, 4, 4)}, eps=0.0)
    loaded.load_state_dict(norm.state_dict())
    assert loaded.normalize({"near": torch.tensor([[1.0, -7.0]])})["near"].tolist() == [[1.0, -2.0]]
