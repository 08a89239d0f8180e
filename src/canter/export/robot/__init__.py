"""What runs on a robot: the control loop, its safety states, its log, and its connections to robots and simulations.

Only numpy and onnxruntime are needed; a copy of these files is in every bundle, in its folder `robot`.
"""
