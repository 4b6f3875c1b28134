"""One model over several ranks: each holds a part of every layer (`models.shard`).

runner   rank 0: what the engine sees; starts the others and tells them what to do
worker   the other ranks: a process each, which does what it is told
group    what they compute together: gloo on the CPU, NCCL on CUDA devices
frames   what they are told
"""
