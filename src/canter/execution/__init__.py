"""How pure tensor functions are run: eagerly, as CUDA graphs, or on a CPU as recordings. No algorithm is known here.

This is the only package that uses private names of torch, and it looks them up when they are first needed: without one
of them canter still imports and trains, eagerly where necessary.
"""
