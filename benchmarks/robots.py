"""Which part of a robot's observation is positions and which is velocities, and how wide they are."""

SEGMENTS = {
    "HalfCheetah-v5": {"position": 8, "velocity": 9},
    "Hopper-v5": {"position": 5, "velocity": 6},
    "Walker2d-v5": {"position": 8, "velocity": 9},
}
