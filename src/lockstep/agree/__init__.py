"""What ranks compare, and how they find out who is late: store keys with deadlines, never a collective."""
