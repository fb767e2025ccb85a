"""The life of a run: its session, loop, checkpoints, resume, export, and the way through Ray."""
