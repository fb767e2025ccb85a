"""Planning a run: its operations, memory, disk and time."""
