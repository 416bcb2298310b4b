"""The published models' expert shapes, at which the kernels are compiled, measured and checked."""

from typing import Literal

Model = Literal["flash", "pro"]

WIDTH: dict[Model, int] = {"flash": 4096, "pro": 7168}  # channels of a row
EXPERTS_PER_TOKEN = 6
TOKENS = (1, 8, 32, 128, 512, 2048, 4096, 8192)  # tokens of a device, as measured
COMPILED_TOKENS = (1, 128, 4096)  # and as compiled for GPUs that are not there
