"""Tests that need several ranks: real processes, real gloo over loopback sockets."""
