"""Two files of random bytes, which the fixture `folder` serves."""

import random

SIZE = 3_000_000
CONTENT = {name: random.Random(name).randbytes(SIZE) for name in ("a.bin", "b.bin")}
