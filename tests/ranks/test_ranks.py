"""Several processes that train together: what they average, that they stay equal, and that they continue exactly."""

import subprocess
import sys
import time
import warnings

import pytest
import torch

from canter.utils.distributed import Ranks


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
        assert found["metrics"] == {"a": 0.5, "b": 3.0}
        assert torch.equal(found["broadcast"], torch.zeros(2, 2))
    assert first["seed"] == 5
    assert second["seed"] != 5


def test_ranks_that_mostly_wait_for_each_other_are_named_once():
    ranks = Ranks()
    ranks.size = 8
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):
            ranks.seconds, ranks.since = 9.0, time.perf_counter() - 10.0
            assert ranks.take_seconds() == 9.0
    (warning,) = caught
    assert "8 ranks" in str(warning.message)
    assert "90%" in str(warning.message)
    assert ranks.seconds == 0.0


def test_steps_per_second_count_every_step_of_all_ranks_once(launcher, tmp_path):
    for found in launcher.run(2, tmp_path, "clocked"):
        assert all(0.6 * 48 < steps < 1.5 * 48 for steps in found)


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


RESUMED = ["mlp", "lstm", "sac"]


@pytest.fixture(scope="module")
def halves(launcher, tmp_path_factory):
    """Runs of two ranks without a break, and from a checkpoint in the middle: by two, one and three ranks."""
    path = tmp_path_factory.mktemp("halves")
    return {
        "whole": launcher.run(2, path, "first_half"),
        2: launcher.run(2, path, "second_half"),
        1: launcher.run(1, path, "second_half"),
        3: launcher.run(3, path, "second_half_of_sac"),
    }


@pytest.mark.parametrize("name", RESUMED)
def test_two_ranks_continue_a_checkpoint_bit_by_bit(halves, name):
    for whole, resumed in zip(halves["whole"], halves[2], strict=True):
        assert resumed[name]["warnings"] == []
        assert resumed[name]["steps"] == whole[name]["steps"]
        assert resumed[name]["metrics"] == whole[name]["metrics"]
        assert resumed[name]["state"] == whole[name]["state"]


@pytest.mark.parametrize("name", RESUMED)
def test_ranks_learn_the_same_from_noise_of_their_own(halves, name):
    first, second = (rank[name] for rank in halves["whole"])
    assert first["state"]["model_state_dict"] == second["state"]["model_state_dict"]
    assert first["state"]["resume"]["generators"]["action"] != second["state"]["resume"]["generators"]["action"]
    assert first["state"]["runner"]["obs"] != second["state"]["runner"]["obs"]
    assert first["metrics"] == second["metrics"]


@pytest.mark.parametrize(("name", "size"), [*((name, 1) for name in RESUMED), ("sac", 3)])
def test_another_number_of_ranks_continues_with_new_streams_and_says_so(halves, name, size):
    ranks = [rank[name] for rank in halves[size]]
    assert any("2 rank(s) saved" in text and "not exactly" in text for text in ranks[0]["warnings"])
    steps = {"mlp": (2 * 3 * 4 * 2, 3 * 4 * 2), "lstm": (2 * 3 * 4 * 2, 3 * 4 * 2), "sac": (2 * 3 * 12, 3 * 12)}
    before, added = steps[name]
    assert ranks[0]["steps"] == before + size * added
    assert len({tuple(rank["noise"].tolist()) for rank in ranks}) == size


def test_canter_imports_where_torch_has_no_distributed_part():
    code = "import sys, torch; sys.modules['torch.distributed.distributed_c10d'] = None; import canter.runners"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
