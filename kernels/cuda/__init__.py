"""The CUDA device layer: Triton kernels, one file per operation, and FlashInfer beside them.

Nothing here is imported where there is no CUDA device, except by tests under Triton's
interpreter (TRITON_INTERPRET=1), where the same kernels run on CPU tensors.
"""
