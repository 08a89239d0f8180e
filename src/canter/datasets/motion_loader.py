"""Motion clips as expert data: frames at any time, pairs and windows at the policy's rate, on the device."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from canter.datasets.motion_clip import ROOT_POS, ROOT_ROT, SUFFIXES, MotionClip, read_clip

CLIPS = Path(__file__).parent / "clips"  # the clips that come with canter


class AMPLoader:
    """Samples frames, pairs and windows of motion clips.

    Args:
        time_between_frames: Seconds between the frames of a pair or window: the policy's control interval.
        data_dir: Directory of the clips; all of them are used if `motion_files` is empty.
        preload_transitions: Sample pairs once, and serve only those.
        motion_files: Files, relative to `data_dir`, or clips.
        fields: Groups such as "joint_pos", or single columns, of a feature vector; by default all but the root's
            position and rotation.
        joint_names: The robot's joints in its order; a clip that lacks one is refused.
        file_joint_names: Order of the joints in clips that do not name them.
        weights: Sampling weight of each clip; by default the weights in the files.
        fps: Frame rate of clips that do not contain it.
        seed: Seed of the samples; None uses torch's default generator.
    """

    def __init__(
        self,
        device: torch.device | str,
        time_between_frames: float,
        data_dir: str | Path = "",
        preload_transitions: bool = False,
        num_preload_transitions: int = 1_000_000,
        motion_files: Sequence[str | Path | MotionClip] = (),
        *,
        fields: Sequence[str] | None = None,
        joint_names: Sequence[str] | None = None,
        file_joint_names: Sequence[str] | None = None,
        weights: Sequence[float] | None = None,
        fps: float | None = None,
        seed: int | None = None,
    ) -> None:
        self.device, self.time_between_frames = torch.device(device), float(time_between_frames)
        if self.time_between_frames <= 0:
            raise ValueError(f"time_between_frames must be positive, got {time_between_frames}")
        files = list(motion_files) or find_clips(Path(data_dir), is_given=bool(str(data_dir)))
        read = (f if isinstance(f, MotionClip) else read_clip(Path(data_dir) / f, file_joint_names, fps) for f in files)
        self.clips = [clip if joint_names is None else clip.with_joints(joint_names) for clip in read]
        self.columns = self.clips[0].columns
        for clip in self.clips:
            if clip.columns != self.columns:
                differing = sorted(set(clip.columns) ^ set(self.columns)) or "in another order"
                raise ValueError(f"{clip.name} and {self.clips[0].name} have other columns: {differing}")
        self._check_durations(self.time_between_frames, f"time_between_frames={self.time_between_frames:g}")
        if weights is not None and (len(weights) != len(self.clips) or min(weights) <= 0):
            raise ValueError(f"weights must be {len(self.clips)} positive numbers, one per clip, got {list(weights)}")
        groups = list(self.clips[0].groups)
        others = [group for group in groups if group not in (ROOT_POS, ROOT_ROT)]
        self.fields = (others or groups) if fields is None else list(fields)
        self.generator = None if seed is None else torch.Generator(self.device).manual_seed(seed)
        clips, self.num_motions = self.clips, len(self.clips)
        self.frames = torch.cat([torch.tensor(clip.frames, dtype=torch.float32, device=device) for clip in clips])
        lengths = torch.tensor([len(clip.frames) for clip in clips], device=self.device)
        self.first_frame, self.last_frame = lengths.cumsum(0) - lengths, lengths - 1
        times = [[clip.frame_duration, clip.duration] for clip in clips]
        self.frame_duration, self.duration = torch.tensor(times, dtype=torch.float32, device=self.device).unbind(1)
        relative = torch.tensor([clip.weight for clip in clips] if weights is None else list(weights))
        self.weights = (relative / relative.sum()).to(self.device, torch.float32)
        columns = (clips[0].where(self.fields), clips[0].where([ROOT_ROT], required=False))
        self.feature_columns, self.rotation_columns = (torch.tensor(c, device=self.device).long() for c in columns)
        self.observation_dim = len(self.feature_columns)
        self.preloaded = self.expert_features(num_preload_transitions) if preload_transitions else None

    def _check_durations(self, shortest: float, name: str) -> None:
        for clip in self.clips:
            if clip.duration < shortest:
                raise ValueError(f"{clip.name} lasts {clip.duration:g} s, less than {name}")

    def frames_at(self, clips: Tensor, times: Tensor) -> Tensor:
        """(n, D) whole frames of clips (n,) at times (n,) in seconds, interpolated; constant beyond both ends."""
        # n frames span n - 1 intervals: time 0 is the first frame, the clip's duration its last.
        position = (times / self.frame_duration[clips]).clamp(min=0).minimum(self.last_frame[clips].to(times.dtype))
        low = position.floor().long()
        high = (low + 1).minimum(self.last_frame[clips])
        blend = (position - low)[:, None]
        start, end = self.frames[self.first_frame[clips] + low], self.frames[self.first_frame[clips] + high]
        frames = torch.lerp(start, end, blend)
        if len(self.rotation_columns):
            turned = slerp(start[:, self.rotation_columns], end[:, self.rotation_columns], blend)
            frames = frames.index_copy(1, self.rotation_columns, turned)
        return frames

    def get_frame_at_time(self, clip: int, time: float) -> Tensor:
        """(D,) one whole frame."""
        if not 0 <= clip < self.num_motions:
            raise IndexError(f"there is no clip {clip}; there are {self.num_motions}")
        return self.frames_at(*(torch.tensor([x], device=self.device) for x in (clip, float(time))))[0]

    def features(self, frames: Tensor) -> Tensor:
        """The columns `fields` of whole frames."""
        return frames.index_select(-1, self.feature_columns)

    def get_full_frame_batch(self, num_frames: int) -> Tensor:
        """(n, D) whole frames at random times, for example to start episodes from."""
        return self.frames_at(*self.draw_moments(num_frames, 1))

    def draw_moments(self, count: int, num_frames: int = 2) -> tuple[Tensor, Tensor]:
        """Clips (n,) by weight and start times (n,), uniform where `num_frames` frames fit into the clip."""
        clips = torch.multinomial(self.weights, count, replacement=True, generator=self.generator)
        span = (num_frames - 1) * self.time_between_frames
        latest = (self.duration - span - self.frame_duration).clamp(min=0)[clips]
        return clips, torch.rand(count, generator=self.generator, device=self.device) * latest

    def expert_features(self, count: int, frames: int = 2) -> Tensor:
        """(count, frames * d) windows, the oldest frame first, like the policy's `ref_obs`."""
        longest = (frames - 1) * self.time_between_frames
        self._check_durations(longest, f"the {longest:g} s of {frames} frames")
        clips, times = self.draw_moments(count, frames)
        steps = [self.frames_at(clips, times + k * self.time_between_frames) for k in range(frames)]
        return torch.cat([self.features(step) for step in steps], -1)

    def feed_forward_generator(self, num_mini_batch: int, mini_batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches (s, s_next), `time_between_frames` apart; preloaded ones if there are any."""
        for _ in range(num_mini_batch):
            if self.preloaded is None:
                pairs = self.expert_features(mini_batch_size)
            else:
                size, total = (mini_batch_size,), len(self.preloaded)
                pairs = self.preloaded[torch.randint(total, size, generator=self.generator, device=self.device)]
            now, then = pairs.chunk(2, -1)
            yield now.contiguous(), then.contiguous()


def slerp(start: Tensor, end: Tensor, blend: Tensor) -> Tensor:
    """The rotation at `blend` (..., 1) in [0, 1] on the short way from quaternions `start` to `end` (..., 4)."""
    dot = (start * end).sum(-1, keepdim=True)
    end = torch.where(dot < 0, -end, end)  # q and -q are one rotation; the nearer of the two is the short way
    angle = torch.acos(dot.abs().clamp(max=1.0)) / torch.pi
    first, second = (part * torch.sinc(part * angle) / torch.sinc(angle) for part in (1 - blend, blend))
    return torch.nn.functional.normalize(first * start + second * end, dim=-1)


def find_clips(directory: Path, is_given: bool = True) -> list[Path]:
    """Names of the clips in a directory; an error if there is none."""
    if not is_given:
        raise ValueError("name the clips: motion_files=[...], or data_dir with clips in it")
    if not directory.is_dir():
        raise FileNotFoundError(f"there is no directory {directory} with motion clips")
    found = sorted(path.relative_to(directory) for path in directory.iterdir() if path.suffix in SUFFIXES)
    if not found:
        raise FileNotFoundError(f"there is no motion clip ({', '.join(SUFFIXES)}) in {directory}")
    return found
