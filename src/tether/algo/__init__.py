"""Pure maths on tensors: no config, no logging, no global random numbers, no process group."""
