"""Environments: what answers the turns of the policy, and may reward them."""
