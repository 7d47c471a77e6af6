"""How gradients travel: the reducer, its callers in eager mode, comm hooks, buffers, join."""
