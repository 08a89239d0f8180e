"""Several processes that train together: what they average, that they stay equal, and that they continue exactly."""

import pytest
import torch


def test_ranks_average_merge_and_agree(launcher, tmp_path):
    first, second = launcher.run(2, tmp_path, "collectives")
    for found in (first, second):
        assert torch.equal(found["mean"][0], torch.full((3,), 0.5))
        assert found["mean"][1] == 5.0
        rows = torch.cat([torch.arange(4.0).view(2, 2), torch.arange(8.0).view(4, 2) + 100.0])
        count, mean, var = found["merged"]
        assert count == 6
        torch.testing.assert_close(mean, rows.mean(0))
        torch.testing.assert_close(var, rows.var(0, correction=0))
        assert found["agreed"] == 7
        assert found["gathered"] == [{"rank": 0}, {"rank": 1}]
        assert found["first"] == "rank 0"
        assert found["metrics"] == {"time/fps": 10.0, "a": 0.5, "b": 3.0}
        assert torch.equal(found["broadcast"], torch.zeros(2, 2))
    assert first["seed"] == 5
    assert second["seed"] != 5


def test_a_collective_is_replayed_from_a_recording(launcher, tmp_path):
    for found in launcher.run(2, tmp_path, "recorded"):
        assert found["eager_only"] == {}
        assert found["graphs"] == 1
        # x grows by the mean of the rows, n + 0.5, in call n.
        wanted = [2.0 * sum(k + 0.5 for k in range(n + 1)) for n in range(8)]
        assert [float(result[0]) for result in found["results"]] == wanted


def assert_same(one, two, other):
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-4, atol=2e-5, msg=lambda text, n=name: f"{n}: {text}")
        assert torch.equal(two[name], other[name]), name


@pytest.fixture(scope="module")
def table_runs(launcher, tmp_path_factory):
    return [
        *launcher.run(1, tmp_path_factory.mktemp("one"), "table_runs"),
        *launcher.run(2, tmp_path_factory.mktemp("two"), "table_runs"),
    ]


@pytest.mark.parametrize("kind", ["mlp", "per_minibatch", "lstm", "sgd", "amp"])
def test_two_ranks_learn_what_one_process_learns_from_the_same_steps(table_runs, kind):
    assert_same(*(run[kind] for run in table_runs))


def test_two_ranks_of_td3_learn_what_one_process_learns_from_the_same_batches(launcher, tmp_path):
    assert_same(*launcher.run(1, tmp_path / "one", "twin_critics"), *launcher.run(2, tmp_path / "two", "twin_critics"))
