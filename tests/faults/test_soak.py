"""A long run keeps its memory, its open files and its speed."""

import os
import statistics
import time
from pathlib import Path

import pytest

from canter.envs.torch_envs import PointRobot

ITERATIONS, FIRST = 20_000, 2_000


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_20000_iterations_keep_memory_files_and_speed(make_runner, tmp_path):
    options = {"num_steps_per_env": 2, "save_interval": 1_000, "keep_checkpoints": 2, "log_interval": 100}
    runner = make_runner(PointRobot(2, max_episode_length=7), tmp_path, **options)
    samples = {}
    begin = time.process_time()

    def sample(runner, stats):
        if runner.iteration % 1_000 == 0:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            files = len(os.listdir("/proc/self/fd"))
            samples[runner.iteration] = (pages * os.sysconf("SC_PAGE_SIZE") / 2**20, files, time.process_time() - begin)

    runner.add_callback("post_iteration", sample)
    runner.learn(ITERATIONS)
    (memory, files, _), (last_memory, last_files, _) = samples[FIRST], samples[ITERATIONS]
    seconds = [samples[n][2] - samples[n - 1_000][2] for n in range(FIRST + 1_000, ITERATIONS + 1, 1_000)]
    early, late = statistics.median(seconds[:5]), statistics.median(seconds[-5:])
    print(
        f"memory {memory:.1f} -> {last_memory:.1f} MiB, files {files} -> {last_files}, {early:.2f} -> {late:.2f} s/1000"
    )
    assert last_memory - memory < 8  # MiB; the history of log entries, at most 10,000, is part of it
    assert last_files == files
    assert late < 1.3 * early
    assert len(list(tmp_path.glob("model_*.pt"))) <= 3
