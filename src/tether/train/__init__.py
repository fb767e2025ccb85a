"""One iteration, the updates inside it, the loop around it."""
