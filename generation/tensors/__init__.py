"""Pure tensors: masks, sampling by uniforms, and models that others have wrapped."""
