"""Mathematics of the training step: tensors in, tensors out; no configuration objects, no ranks, no input or output."""
