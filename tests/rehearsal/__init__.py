"""A dress rehearsal: the CUDA path's host code as it runs on a GPU, where none is.

    tensors    what claims to be on cuda:0 has shapes, strides and addresses, and no memory
    streams    `torch.cuda` as a log: streams, events, pinned memory, graphs
    launches   triton's own launch up to the compiler: what would be compiled, and with what grid
    models     runners of real shapes
    scenes     what they are driven through; `python -m rehearsal.scenes` prints what came of it

A process rehearses or it does not: `install` replaces parts of torch and triton for good. What
CUDA would refuse, wait for or do slowly becomes a line in `LOG.faults`.
"""
