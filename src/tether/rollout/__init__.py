"""Sampling: the Sampler and Episode protocols, and the sampler that runs in this process."""
