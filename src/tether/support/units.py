"""Write numbers as people read them."""


def si(number: float | int) -> str:
    """Return a count with its SI letter: 1.50k."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.2f}{letter}"
    return f"{number:g}"


def byte_text(number: float | int) -> str:
    """Return a number of bytes with its binary unit: 1.5 GiB."""
    for size, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB")):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number / 2**10:.0f} KiB"


def time_text(seconds: float | int) -> str:
    """Return a duration with the unit that suits it: 2.5 min."""
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{1000 * seconds:.0f} ms" if seconds >= 0.01 else f"{1000 * seconds:.2g} ms"
