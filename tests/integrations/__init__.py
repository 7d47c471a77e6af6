"""Training libraries on Lockstep, next to the same runs on torch's DDP."""
