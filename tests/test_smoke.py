import tether


def test_s(tiny_config):
    r = tether.train(tiny_config)
    assert r.iterations_done == 2
