"""The engine on a GPU: captured graphs, Triton kernels, the decoder stack in fewer and larger ones. Imported only there."""
