"""Say what is wrong with a run, by its own numbers."""
