"""The ``lockstep`` command: launch a script on many ranks, and say what is usable on this machine."""
