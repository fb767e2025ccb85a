"""Pure maths on tensors: no config, no logging, no global random numbers, no process group.

Stable: names, arguments and shapes change only with a line in CHANGELOG.md. GAE of one response,
whose only reward is 1 on its last token, with a critic that knows nothing:

>>> import torch
>>> from tether.algo.advantages import gae
>>> mask = torch.tensor([[True, True, True]])  # rows x response
>>> rewards = torch.tensor([[0.0, 0.0, 1.0]])
>>> gae(rewards, torch.zeros(1, 3), torch.zeros(1), mask, gamma=1.0, lam=0.5)
tensor([[0.2500, 0.5000, 1.0000]])
"""
