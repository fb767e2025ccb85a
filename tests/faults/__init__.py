"""Faults to survive with nothing lost: the rows of docs/reliability.md."""
