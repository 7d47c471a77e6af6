"""One host's ranks: start them, watch them, end them, say why they ended, and what each rank does for that."""
