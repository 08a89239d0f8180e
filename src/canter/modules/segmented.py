"""Names of an observation's parts, as every policy on flat observations has them."""

from __future__ import annotations

from canter.utils.obs_layout import ObsLayout


class Segmented:
    """Has an observation and a critic's observation made of named parts."""

    obs_layout: ObsLayout
    critic_obs_layout: ObsLayout

    @property
    def obs_segments(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the actor observation's parts."""
        return self.obs_layout.shapes

    @property
    def critic_obs_segments(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the critic observation's parts."""
        return self.critic_obs_layout.shapes

    @property
    def privileged_obs_segments(self) -> dict[str, tuple[int, ...]]:
        """The same as `critic_obs_segments`."""
        return self.critic_obs_segments
