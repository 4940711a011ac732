"""Parallel token prediction: features of uniforms, gated adapters, masks, `PTPForCausalLM`."""
