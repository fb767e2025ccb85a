"""Generators of the tasks that ship."""
