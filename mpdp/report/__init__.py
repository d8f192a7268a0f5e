"""What a run shows: one progress bar or one line an epoch, from rank 0 alone; and where the time of its steps went."""
