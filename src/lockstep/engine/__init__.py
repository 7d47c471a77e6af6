"""How gradients travel: the step, its feeders, the reducer and its parts; docs/architecture.md has the way through."""
