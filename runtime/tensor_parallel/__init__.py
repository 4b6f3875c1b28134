"""One model over several ranks: each holds a part of every layer (`models.shard`).

runner   rank 0: what the engine sees
ranks    the processes of the others: started, told, heard, ended
worker   such a process, which does what it is told
group    what they compute together: gloo on the CPU, NCCL on CUDA devices
pool     pages made of the parts of all ranks
frames   what they are told
"""
