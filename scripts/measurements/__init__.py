"""What the measuring scripts share: lengths, reservations, allocators, simulations, reports."""
