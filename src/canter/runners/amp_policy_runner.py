"""The on-policy runner for motion priors, with checks of the environment's motion features."""

import warnings
from collections.abc import Mapping
from typing import Any

from canter.envs.vec_env import StepRecord
from canter.runners.on_policy_runner import OnPolicyRunner


class AmpPolicyRunner(OnPolicyRunner):
    """Trains APPO and ATPPO; the metrics include style and task rewards and statistics of the discriminator."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if "motion_prior" in self.alg.extensions:
            self.stats.check_first = self.check_motion
        else:
            effect = "learns no style: AmpPolicyRunner runs it as OnPolicyRunner would"
            way_out = "use APPO or ATPPO with a policy such as AmpActorCritic"
            warnings.warn(f"{type(self.alg).__name__} {effect}; {way_out}", stacklevel=2)

    def check_motion(self, record: StepRecord) -> None:
        """Raise if the first step lacks the features that motion priors learn from."""
        extras, has_clips = record.extras, self.alg.motion_prior.bank is not None
        groups, missing = extras.get("observations"), []
        if not isinstance(groups, Mapping) or groups.get("ref_obs") is None:
            missing.append("extras['observations']['ref_obs'], the policy's motion: wrap it in MotionFeatures")
        if extras.get("ref_motion") is None and not has_clips:
            missing.append("extras['ref_motion'], the expert's motion: or set amp_motion_loader")
        if missing:
            raise KeyError(f"the environment does not give {'; nor '.join(missing)}")
