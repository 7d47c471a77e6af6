"""The compiled path: gradient communication inside the compiled backward."""
