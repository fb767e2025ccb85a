"""The run directory: what is written there, how it is read, and the metrics that go in."""
