"""ELECTRA pre-training in JAX, the same on a laptop and on a pod."""
