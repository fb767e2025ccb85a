"""Sampling: the Sampler and Episode protocols, samplers, turns and tools."""
