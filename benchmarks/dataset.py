"""How fast trajectory files are written, and read into batches.

    python benchmarks/dataset.py
    python benchmarks/dataset.py --megabytes 500 --num-envs 64 --batch 24 --file-steps 64

The rate is that of file bytes whose content was verified (CRC-32) and served in batches, from the page cache and, where
it can be dropped (Linux), from the disk. Batches hold more than the files: every observation is in them twice.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from report import report

from canter.storage.rollout_files import RolloutDataset, TrajectoryWriter

TRAJECTORY_STEPS = 1024


def arrays(steps, rng):
    draw = lambda width: rng.standard_normal((steps, width), dtype=np.float32)  # noqa: E731
    flags = {"dones": np.zeros((steps, 1), np.uint8), "timeouts": np.zeros(steps, bool)}
    return {
        "observations": draw(48),
        "privileged_observations": draw(235),
        "actions": draw(12),
        "rewards": draw(1),
        **flags,
    }


def write(folder, megabytes, file_steps):
    """Trajectories of 1024 steps: 48 numbers for the actor, 235 for the critic, 12 actions."""
    rng = np.random.default_rng(0)
    piece = arrays(file_steps, rng)
    size = sum(array.nbytes for array in piece.values())
    count = max(1, round(megabytes * 1e6 / (size * TRAJECTORY_STEPS / file_steps)))
    begin = time.perf_counter()
    with TrajectoryWriter(folder) as writer:
        for number in range(count):
            for start in range(0, TRAJECTORY_STEPS, file_steps):
                writer.add(number, piece, start)
            writer.flush()
    seconds = time.perf_counter() - begin
    total = sum(path.stat().st_size for path in folder.rglob("*.safetensors")) / 1e6
    return total, total / seconds


def forget(folder):
    """Drop the files from the page cache."""
    for path in folder.rglob("*.safetensors"):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def read(folder, total, num_envs, batch, device):
    data = RolloutDataset(folder, num_envs, device=device)
    begin, batches = time.perf_counter(), 0
    while True:
        try:
            data.get_batch(batch)
        except StopIteration:
            break
        batches += 1
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
    return total / (time.perf_counter() - begin), batches


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=200)
    parser.add_argument("--num-envs", type=int, default=32)
    parser.add_argument(
        "--batch", type=int, default=24, help="steps of each environment in a batch; 0 for single steps"
    )
    parser.add_argument("--file-steps", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", type=Path, help="where to write; a temporary directory by default")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        total, write_rate = write(folder, args.megabytes, args.file_steps)
        rates = [read(folder, total, args.num_envs, args.batch or None, args.device)[0] for _ in range(args.repeats)]
        cold = None
        if hasattr(os, "posix_fadvise"):
            forget(folder)
            cold = read(folder, total, args.num_envs, args.batch or None, args.device)[0]
    finally:
        shutil.rmtree(folder)
    result = {
        "megabytes": round(total),
        "num_envs": args.num_envs,
        "batch": args.batch,
        "file_steps": args.file_steps,
        "device": args.device,
        "write_mb_s": round(write_rate),
        "read_mb_s": round(max(rates)),
        "read_cold_mb_s": None if cold is None else round(cold),
    }
    print(f"{total:.0f} MB in files of {args.file_steps} steps, {args.num_envs} environments x {args.batch} steps")
    print(f"written, synced to disk   {write_rate:8.0f} MB/s")
    print(f"read into batches         {max(rates):8.0f} MB/s (best of {args.repeats}), lowest {min(rates):.0f}")
    if cold is not None:
        print(f"the same from the disk    {cold:8.0f} MB/s")
    report(result, args.out)


if __name__ == "__main__":
    main()
