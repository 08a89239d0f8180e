"""The on-policy loop for motion priors: the same loop, with checks of what the environment must give."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from canter.algorithms.appo import APPOAlgoMixin
from canter.envs.vec_env import StepRecord
from canter.runners.on_policy_runner import OnPolicyRunner


class AmpPolicyRunner(OnPolicyRunner):
    """Trains APPO and ATPPO; style and task rewards and the discriminator's health are among the metrics."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.uses_motion = isinstance(self.alg, APPOAlgoMixin)
        self.has_checked = not self.uses_motion
        if not self.uses_motion:
            warnings.warn(
                f"{type(self.alg).__name__} learns no style: AmpPolicyRunner runs it as OnPolicyRunner would; "
                "use APPO or ATPPO with a policy such as AmpActorCritic",
                stacklevel=2,
            )

    def take_record(self, record: StepRecord) -> None:
        """Guard and count one step; the first one must have motion features."""
        if not self.has_checked:
            check_motion(record.extras, self.alg.prior.bank is not None)
            self.has_checked = True
        super().take_record(record)


def check_motion(extras: Mapping[str, Any], has_clips: bool) -> None:
    """Raise if a step lacks what motion priors learn from."""
    groups = extras.get("observations")
    missing = []
    if not isinstance(groups, Mapping) or groups.get("ref_obs") is None:
        missing.append("extras['observations']['ref_obs'], the policy's motion: wrap it in MotionFeatures")
    if extras.get("ref_motion") is None and not has_clips:
        missing.append("extras['ref_motion'], the expert's motion: or set amp_motion_loader")
    if missing:
        raise KeyError(f"the environment does not give {'; nor '.join(missing)}")
